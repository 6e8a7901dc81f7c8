//! `fastps certs`: a CA, certificates of servers and clients, and their contents.

pub(crate) mod authority;
pub(crate) mod issue;
mod show;

use crate::command::{in_json, note, say};
use crate::files;
use authority::Authority;
use clap::{ArgGroup, Parser, Subcommand};
use fastps_core::error::{Error, Kind, Result};
use fastps_server::{Role, Scope};
use issue::{Holder, Request};
use std::ffi::OsString;
use std::path::PathBuf;

/// Make a certificate authority (CA) and certificates for TLS, and show what is in certificates.
#[derive(Debug, Parser)]
#[command(name = "fastps certs")]
pub(crate) struct CertsArgs {
    #[command(subcommand)]
    command: CertsCommand,
}

#[derive(Debug, Subcommand)]
enum CertsCommand {
    /// Make a CA: DIR/ca.pem, which everybody may have, and DIR/ca-key.pem, which signs and stays where it
    /// is.
    Init {
        /// The folder for the CA and what it issues; it is made with mode 700.
        dir: PathBuf,
        /// Days until the CA expires.
        #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
    },
    /// Issue a certificate of the CA, followed by the CA, and its private key: DIR/NAME.pem and
    /// DIR/NAME-key.pem.
    #[command(group = ArgGroup::new("holder").required(true).args(["server", "client"]))]
    Issue {
        /// The folder of the CA.
        dir: PathBuf,
        /// For a server with these host names and IP addresses; the first one names the files.
        #[arg(long, value_delimiter = ',', value_name = "HOSTS")]
        server: Vec<String>,
        /// For a client of this name.
        #[arg(long, value_name = "NAME", requires = "role")]
        client: Option<String>,
        /// Role of the client: reader, worker, admin or server.
        #[arg(long, conflicts_with = "server")]
        role: Option<String>,
        /// Groups that the client may use, or * [default: all, or none with --namespaces].
        #[arg(long, value_delimiter = ',', value_name = "NAMES", conflicts_with = "server")]
        groups: Vec<String>,
        /// Namespaces that the client may use, or * for these and all groups [default: all, or none with
        /// --groups].
        #[arg(long, value_delimiter = ',', value_name = "NAMES", conflicts_with = "server")]
        namespaces: Vec<String>,
        /// Days until the certificate expires.
        #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
        days: u32,
        /// Sign the public key of this request (PEM) and write no private key, so that the key need not
        /// travel. Names and role are those given here.
        #[arg(long, value_name = "FILE")]
        csr: Option<PathBuf>,
        /// Name of the files instead of NAME.
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// Show the certificates in PEM files: names, role, issuer, expiry, and whether a private key belongs to
    /// them. The exit code is 1 if one has expired or is about to, or if a key or the order is wrong.
    Show {
        /// Files with certificates or private keys. The key of NAME.pem is also looked for in NAME-key.pem.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// The exit code is also 1 if a certificate expires within these days.
        #[arg(long, default_value_t = 0, value_name = "DAYS")]
        warn_days: u32,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    crate::command::run(args, |args: CertsArgs| execute(args.command))
}

fn execute(command: CertsCommand) -> Result<bool> {
    match command {
        CertsCommand::Init { dir, days } => {
            let authority = Authority::create(&dir, days)?;
            let folder = dir.display();
            say(&[
                format!(
                    "{}: the CA; give it to every server and client",
                    authority.certificate_file().display()
                ),
                format!("{}: its private key; keep it here and nowhere else", authority.key_file().display()),
                format!("next: fastps certs issue {folder} --server HOST"),
            ])?;
            Ok(true)
        }
        CertsCommand::Issue { dir, server, client, role, groups, namespaces, days, csr, name } => {
            let holder = match client {
                None => Holder::Server { hosts: server },
                Some(name) => Holder::Client {
                    name,
                    role: role.unwrap_or_default().parse::<Role>()?,
                    scope: scope(&groups, &namespaces)?,
                },
            };
            let request = csr.map(|file| read(&file)).transpose()?;
            let issued =
                Authority::open(&dir)?.issue(&Request { holder, days, csr: request, file_name: name })?;
            let mut lines = vec![format!("{}: the certificate and the CA", issued.certificate.display())];
            lines.extend(issued.key.map(|key| format!("{}: its private key", key.display())));
            say(&lines)?;
            Ok(true)
        }
        CertsCommand::Show { files, warn_days, json } => {
            let found = show::look(&files, warn_days, fastps_server::human::now() as i64)?;
            if json {
                say(&[in_json(&found)?])?;
            } else {
                say(&found.lines())?;
                found.problems.iter().for_each(note);
            }
            Ok(found.ok)
        }
    }
}

/// The scope of groups and namespaces; everything if neither is given, or all of each that is given (`*`).
pub(crate) fn scope(groups: &[String], namespaces: &[String]) -> Result<Scope> {
    if groups.iter().chain(namespaces).all(|name| name == "*") {
        return Ok(Scope::Everything);
    }
    if groups.iter().chain(namespaces).any(|name| name == "*") && groups != ["*"] {
        let why = "* is not the name of a group or namespace";
        let expected = "names, or neither --groups nor --namespaces, which allows everything";
        return Err(Error::new(Kind::Config, why).expected(expected, "*"));
    }
    let namespaces = namespaces.iter().map(|name| format!("namespace:{name}"));
    groups.iter().cloned().chain(namespaces).collect::<Vec<_>>().join(",").parse()
}

pub(crate) fn read(file: &std::path::Path) -> Result<String> {
    std::fs::read_to_string(file)
        .map_err(|error| Error::new(Kind::Config, format!("cannot read {}: {error}", file.display())))
}

/// Writes a pair of files, both or none.
pub(crate) fn write_pair(public: (&PathBuf, &str), private: Option<(&PathBuf, &str)>) -> Result<()> {
    files::check_are_new([public.0].into_iter().chain(private.map(|(path, _)| path)))?;
    if let Some((path, text)) = private {
        files::create(path, files::PRIVATE, text)?;
    }
    files::create(public.0, files::PUBLIC, public.1).inspect_err(|_| {
        if let Some((path, _)) = private {
            let _ = std::fs::remove_file(path);
        }
    })
}
