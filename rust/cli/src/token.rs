//! `fastps token`: the principals of a token file.

use crate::certs::scope;
use crate::command::{in_json, say};
use crate::files;
use clap::{Args, Parser, Subcommand};
use fastps_core::error::{Error, Kind, Result};
use fastps_core::text::nearest;
use fastps_server::human::{now, parse_bytes, size};
use fastps_server::{
    Limits, Principal, Role, Scope, TokenEntry, TokenFile, principal_uri, time_text, token_hash,
};
use fastps_transport::token::Token;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// First lines of a new file.
const HEADER: &str = "# Who may use the servers: fastps token new and revoke change this file, and people may, too.\n\
                      # name role groups-or-namespaces sha256-of-the-token [expires=] [frames/s=] [bytes/s=] [memory=]\n";

/// Add principals to a token file, list them and revoke their tokens. Servers read the file within seconds.
#[derive(Debug, Parser)]
#[command(name = "fastps token")]
pub(crate) struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Add a principal, and show its token this once, on standard error: the file has only its SHA-256.
    New {
        /// The token file of the servers; it is made with mode 600.
        file: PathBuf,
        /// Name of the principal.
        name: String,
        #[command(flatten)]
        grant: Grant,
        /// Write the token to this new file, with mode 600, instead of showing it.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// List the principals.
    List {
        /// The token file of the servers.
        file: PathBuf,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Remove a principal. Servers end its streams within 10 seconds.
    Revoke {
        /// The token file of the servers.
        file: PathBuf,
        /// Name of the principal.
        name: String,
    },
}

/// Rights of a principal.
#[derive(Debug, Args)]
struct Grant {
    /// Its role: reader, worker, admin or server.
    #[arg(long)]
    role: String,
    /// Groups that it may use, or * [default: all, or none with --namespaces].
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    groups: Vec<String>,
    /// Namespaces that it may use, or * for these and all groups [default: all, or none with --groups].
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    namespaces: Vec<String>,
    /// Days until the token expires [default: never].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: Option<u32>,
    /// Most frames a second to each shard.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    frames_per_second: Option<u64>,
    /// Most bytes a second to each shard, such as 100MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    bytes_per_second: Option<u64>,
    /// Most memory on each shard for the tensors that it registers, such as 4GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    crate::command::run(args, |args: TokenArgs| execute(args.command).map(|()| true))
}

fn execute(command: TokenCommand) -> Result<()> {
    match command {
        TokenCommand::New { file, name, grant, out } => {
            let token = Token::draw()?;
            let entry = grant.entry(&name, &token)?;
            match &out {
                Some(out) => add_with_token(&file, &entry, &token, out)?,
                None => add(&file, &entry)?,
            }
            let shown = out
                .map_or(token.expose().to_owned(), |out| format!("{}: the token of {name}", out.display()));
            writeln!(std::io::stderr(), "{shown}")
                .map_err(|error| Error::new(Kind::Internal, format!("cannot print: {error}")))
        }
        TokenCommand::List { file, json } => {
            let found = TokenFile::read(&file)?;
            let now = now();
            if json {
                let entries: Vec<_> = found.entries().iter().map(|entry| in_json_of(entry, now)).collect();
                return say(&[in_json(&serde_json::json!({ "principals": entries }))?]);
            }
            say(&found.entries().iter().map(|entry| line(entry, now)).collect::<Vec<_>>())
        }
        TokenCommand::Revoke { file, name } => revoke(&file, &name),
    }
}

impl Grant {
    fn entry(self, name: &str, token: &Token) -> Result<TokenEntry> {
        let scope = scope(&self.groups, &self.namespaces)?;
        let limits = Limits {
            frames_per_second: self.frames_per_second,
            bytes_per_second: self.bytes_per_second,
            memory: self.memory,
        };
        let mut entry = entry(name, self.role.parse()?, scope, token)?;
        entry.principal.limits = limits;
        entry.expires = self.days.map(|days| now() + u64::from(days) * 86_400);
        Ok(entry)
    }
}

/// A principal without limits.
pub(crate) fn entry(name: &str, role: Role, scope: Scope, token: &Token) -> Result<TokenEntry> {
    principal_uri::check_name(name)?;
    let hash = token_hash(token);
    Ok(TokenEntry { principal: Principal::new(name, role, scope), hash, expires: None })
}

/// Adds a principal to a token file, and writes its token to a new file.
pub(crate) fn add_with_token(file: &Path, entry: &TokenEntry, token: &Token, out: &Path) -> Result<()> {
    files::create(out, files::PRIVATE, &format!("{}\n", token.expose()))?;
    add(file, entry).inspect_err(|_| {
        let _ = std::fs::remove_file(out);
    })
}

fn add(file: &Path, entry: &TokenEntry) -> Result<()> {
    files::change(file, |before| {
        if before.is_some() {
            TokenFile::read(file)?;
        }
        let mut text = before.unwrap_or(HEADER).to_owned();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.extend([entry.to_string().as_str(), "\n"]);
        TokenFile::parse(&text)?;
        Ok((text, ()))
    })
}

fn revoke(file: &Path, name: &str) -> Result<()> {
    files::change(file, |_| {
        let found = TokenFile::read(file)?;
        let names: Vec<_> = found.entries().iter().map(TokenEntry::name).collect();
        if !names.contains(&name) {
            let expected = match nearest(name, names) {
                Some(near) => format!("{near:?}"),
                None => format!("a name that fastps token list {} shows", file.display()),
            };
            return Err(Error::new(Kind::Config, "no principal has this name")
                .expected(expected, format!("{name:?}")));
        }
        let text = crate::certs::read(file)?;
        let others =
            text.split_inclusive('\n').filter(|line| line.split_ascii_whitespace().next() != Some(name));
        Ok((others.collect(), ()))
    })
}

fn line(entry: &TokenEntry, now: u64) -> String {
    let Principal { role, scope, limits, .. } = &entry.principal;
    let expiry = entry.expires.map(|end| {
        let word = if entry.is_expired(now) { "EXPIRED on" } else { "until" };
        format!("{word} {}", time_text(end))
    });
    let parts = [
        Some(format!("{}: {role} for {scope}", entry.name())),
        expiry,
        limits.frames_per_second.map(|frames| format!("{frames} frames/s")),
        limits.bytes_per_second.map(|bytes| format!("{}/s", size(bytes))),
        limits.memory.map(|bytes| format!("{} of memory", size(bytes))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn in_json_of(entry: &TokenEntry, now: u64) -> serde_json::Value {
    let Principal { role, scope, limits, .. } = &entry.principal;
    serde_json::json!({
        "name": entry.name(), "role": role.name(), "scope": scope.to_string(),
        "expires": entry.expires.map(time_text), "expired": entry.is_expired(now),
        "frames_per_second": limits.frames_per_second, "bytes_per_second": limits.bytes_per_second,
        "memory": limits.memory,
    })
}
