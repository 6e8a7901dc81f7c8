//! The web listener of a server process: metrics, health, and the state of its shards, for operators and
//! their tools.
//!
//! It speaks HTTP/1 on a thread with a runtime of its own, so no request runs on a shard's thread. It answers
//! GET and HEAD only, and changes nothing. Off loopback it speaks TLS with the server's certificate. Callers
//! need the credentials that the shards ask for.

mod answers;
mod caller;
mod cluster;
mod family;
mod hosts;
mod measured;
mod metrics;
mod names;
mod process;
mod serve;
mod site;
mod totals;

use crate::auth::access::Access;
use crate::cluster::node::Node;
use crate::config::{DEFAULT_WEB, ServerConfig, WebAddress, resolve};
use crate::listeners::Listeners;
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result};
use fastps_transport::tls::ServerTls;
use hosts::Hosts;
use metrics::Totals;
use site::Site;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// The shards of this process, as far as they have started.
#[derive(Debug)]
pub(crate) struct Subject {
    files: Vec<(u32, Files)>,
    nodes: OnceLock<Vec<Arc<Node>>>,
    /// Knows the callers.
    access: Arc<Access>,
    totals: Mutex<Totals>,
}

impl Subject {
    pub(crate) fn new(files: Vec<(u32, Files)>, access: Arc<Access>) -> Arc<Self> {
        Arc::new(Self { files, nodes: OnceLock::new(), access, totals: Mutex::default() })
    }

    /// Shows the shards, which have recovered.
    pub(crate) fn show(&self, nodes: &[Arc<Node>]) {
        let _ = self.nodes.set(nodes.to_vec());
    }

    /// The shards; none while they recover.
    fn nodes(&self) -> &[Arc<Node>] {
        self.nodes.get().map_or(&[], Vec::as_slice)
    }

    /// Why the process does not serve; `None`: every shard does.
    fn trouble(&self) -> Option<String> {
        let Some(nodes) = self.nodes.get() else {
            let shards = self.files.iter();
            let progress = shards.map(|(shard, files)| format!("shard {shard}: {}", files.progress()));
            return Some(format!("the server is recovering: {}", progress.collect::<Vec<_>>().join("; ")));
        };
        nodes.iter().find_map(|node| Some(format!("shard {}: {}", node.index(), node.trouble()?)))
    }
}

/// A web listener; dropping it closes it.
#[derive(Debug)]
pub(crate) struct Web {
    url: String,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Web {
    /// Opens the listener; `None` if it is off, or the default port is taken, which is logged. It speaks TLS
    /// at addresses other than loopback, and where clients must show certificates.
    pub(crate) fn open(
        config: &ServerConfig,
        tls: Option<&ServerTls>,
        subject: Arc<Subject>,
    ) -> Result<Option<Self>> {
        let (text, asked) = match &config.web {
            WebAddress::Off => return Ok(None),
            WebAddress::Default => (DEFAULT_WEB, false),
            WebAddress::At(text) => (text.as_str(), true),
        };
        let addresses = resolve(text)?;
        let open = addresses.iter().find(|address| !address.ip().is_loopback());
        if let Some(open) = open {
            config.check_closed(open).map_err(|mut error| {
                error.message.insert_str(0, "--web: ");
                error
            })?;
            if config.danger().is_some() {
                tracing::warn!(address = %open, "--insecure: everybody who reaches the web listener may read it");
            }
        }
        let tls = tls.filter(|tls| open.is_some() || tls.asks).cloned();
        let listeners = match Listeners::bind(&addresses) {
            Ok(listeners) => listeners,
            Err(error) if asked => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "there is no web listener; --web HOST:PORT chooses another port");
                return Ok(None);
            }
        };
        let failed = |error: std::io::Error| {
            Error::new(Kind::Internal, format!("cannot start the web listener: {error}"))
        };
        let first = listeners.addresses().map_err(failed)?.into_iter().next();
        let address = first.ok_or_else(|| Error::new(Kind::Config, "the web listener has no address"))?;
        let hosts = Hosts::new(text, address.port(), config, tls.clone())?;
        let url = format!("{}://{address}", hosts.scheme());
        let site = Arc::new(Site::new(hosts, subject, tls));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (close, closed) = oneshot::channel();
        let work = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve::serve(listeners, site) => {}
                    _ = closed => {}
                }
            });
            // Ends the connections, too.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("fastps-web".to_owned()).spawn(work).map_err(failed)?;
        Ok(Some(Self { url, close: Some(close), thread: Some(thread) }))
    }

    /// Where it is, with the actual port, such as `http://127.0.0.1:7069`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        drop(self.close.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
