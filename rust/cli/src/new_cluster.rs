//! `fastps cluster new`: all that servers and clients of a new cluster prove themselves with.

use crate::certs::authority::Authority;
use crate::certs::issue::{Holder, Request};
use crate::command::say;
use crate::files::{self, PUBLIC};
use crate::token::{add_with_token, entry};
use clap::{Parser, Subcommand};
use fastps_core::error::{Error, Kind, Result};
use fastps_server::{Role, Scope};
use fastps_transport::token::Token;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folder of the files for clients.
const CLIENTS: &str = "clients";
/// Principals of clients, and their roles.
const PRINCIPALS: [(&str, Role); 3] =
    [("admin", Role::Admin), ("worker", Role::Worker), ("reader", Role::Reader)];

/// Prepare a cluster.
#[derive(Debug, Parser)]
#[command(name = "fastps cluster")]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Make a CA, a folder for each server with its certificate and tokens, and a folder for clients with the
    /// tokens of an admin, a worker and a reader. Print the commands for each machine.
    New {
        /// The folder to make; it must not exist or must be empty.
        dir: PathBuf,
        /// Host names or IP addresses of the servers, in the order of their shards.
        #[arg(long, value_delimiter = ',', value_name = "HOSTS", required = true)]
        servers: Vec<String>,
        /// Port of all servers.
        #[arg(long, default_value_t = 7070)]
        port: u16,
        /// Days until the certificates of the servers expire.
        #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

/// Runs the command and returns the exit status. The first argument is the program's name.
pub(crate) fn run(args: impl IntoIterator<Item = OsString>) -> i32 {
    crate::command::run(args, |args: ClusterArgs| {
        let ClusterCommand::New { dir, servers, port, days } = args.command;
        create(&dir, &servers, days)?;
        say(&commands(&dir, &servers, port))?;
        Ok(true)
    })
}

/// Makes the folder: whole, or not at all.
fn create(dir: &Path, servers: &[String], days: u32) -> Result<()> {
    if let Some((_, twice)) = servers.iter().enumerate().find(|(k, host)| servers[..*k].contains(host)) {
        return Err(Error::new(Kind::Config, "a server is listed twice").expected("different hosts", twice));
    }
    let is_empty = |dir: &Path| std::fs::read_dir(dir).is_ok_and(|mut found| found.next().is_none());
    if dir.symlink_metadata().is_ok() && !is_empty(dir) {
        return Err(Error::new(Kind::Config, format!("{} exists, and is not overwritten", dir.display()))
            .expected("a new folder", "one with files"));
    }
    let mut name = dir.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = dir.with_file_name(name);
    let failed = |error| Error::new(Kind::Config, format!("cannot make {}: {error}", dir.display()));
    let made = fill(&new, servers, days).and_then(|()| std::fs::rename(&new, dir).map_err(failed));
    made.inspect_err(|_| {
        let _ = std::fs::remove_dir_all(&new);
    })
}

fn fill(dir: &Path, servers: &[String], days: u32) -> Result<()> {
    let authority = Authority::create(dir, 3650)?;
    let (tokens, clients) = (dir.join("tokens"), dir.join(CLIENTS));
    let add = |name: &str, role, folder: &Path, file: &str| {
        let token = Token::draw()?;
        add_with_token(&tokens, &entry(name, role, Scope::Everything, &token)?, &token, &folder.join(file))
    };
    files::private_folder(&clients)?;
    files::create(&clients.join("ca.pem"), PUBLIC, authority.certificate())?;
    for (name, role) in PRINCIPALS {
        add(name, role, &clients, &format!("{name}.token"))?;
    }
    for host in servers {
        let holder = Holder::Server { hosts: vec![host.clone()] };
        let request = Request { holder, days, csr: None, file_name: None };
        let name = request.file_name()?;
        if name == CLIENTS || PRINCIPALS.iter().any(|(taken, _)| *taken == name) {
            return Err(Error::new(Kind::Config, "the name of the server is reserved")
                .expected("another name", format!("{name:?}")));
        }
        let folder = dir.join(&name);
        files::private_folder(&folder)?;
        authority.issue_as(&request, folder.join("cert.pem"), folder.join("key.pem"))?;
        add(&name, Role::Server, &folder, "server.token")?;
    }
    let text = crate::certs::read(&tokens)?;
    servers.iter().try_for_each(|host| {
        files::create(&dir.join(crate::certs::issue::plain(host)).join("tokens"), files::PRIVATE, &text)
    })
}

/// The commands for each machine.
fn commands(dir: &Path, servers: &[String], port: u16) -> Vec<String> {
    let address = |host: &String| {
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    };
    let cluster = servers.iter().map(address).collect::<Vec<_>>().join(",");
    let shown = dir.display();
    let mut lines = vec![format!("{shown}: the CA, and a folder for each machine; ca-key.pem stays here")];
    for host in servers {
        let folder = crate::certs::issue::plain(host);
        lines.push(String::new());
        lines.push(format!("On {host}, after scp -rp {shown}/{folder} {host}:"));
        lines.push(format!(
            "  fastps serve --listen {} --cluster {cluster} --tls-cert {folder}/cert.pem --tls-key {folder}/key.pem \
             --tokens {folder}/tokens --server-token-file {folder}/server.token",
            address(host)
        ));
    }
    lines.push(String::new());
    lines.push(format!(
        "For clients, {shown}/{CLIENTS} has ca.pem and the tokens of an admin, a worker and a reader:"
    ));
    lines.push(format!(
        "  fastps.connect({cluster:?}, tls_ca=\"{shown}/{CLIENTS}/ca.pem\", token_file=\"{shown}/{CLIENTS}/worker.token\")"
    ));
    lines.push(format!(
        "  fastps status {cluster} --tls-ca {shown}/{CLIENTS}/ca.pem --token-file {shown}/{CLIENTS}/reader.token"
    ));
    lines
}
