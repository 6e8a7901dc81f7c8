//! The web listener of a server process: metrics, health, and the state of its shards, for operators and
//! their tools.
//!
//! It speaks HTTP/1 on a thread with a runtime of its own, so no request runs on a shard's thread. It answers
//! GET and HEAD only, and changes nothing.

mod answers;
mod cluster;
mod family;
mod hosts;
mod measured;
mod metrics;
mod names;
mod serve;

use crate::auth::access::Access;
use crate::cluster::node::Node;
use crate::config::{DEFAULT_WEB, WebAddress, resolve};
use crate::listeners::Listeners;
use crate::persistence::Files;
use fastps_core::error::{Error, Kind, Result};
use hosts::Hosts;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// The shards of this process, as far as they have started.
#[derive(Debug)]
pub(crate) struct Subject {
    files: Vec<(u32, Files)>,
    nodes: OnceLock<Vec<Arc<Node>>>,
    /// Knows the callers.
    access: Arc<Access>,
}

impl Subject {
    pub(crate) fn new(files: Vec<(u32, Files)>, access: Arc<Access>) -> Arc<Self> {
        Arc::new(Self { files, nodes: OnceLock::new(), access })
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
    address: SocketAddr,
    close: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Web {
    /// Opens the listener; `None` if it is off, or the default port is taken, which is logged.
    pub(crate) fn open(address: &WebAddress, insecure: bool, subject: Arc<Subject>) -> Result<Option<Self>> {
        let (text, asked) = match address {
            WebAddress::Off => return Ok(None),
            WebAddress::Default => (DEFAULT_WEB, false),
            WebAddress::At(text) => (text.as_str(), true),
        };
        let addresses = resolve(text)?;
        if let Some(open) = addresses.iter().find(|address| !address.ip().is_loopback()).filter(|_| !insecure)
        {
            let error = "--web has no TLS: at an address other than loopback its traffic can be read";
            return Err(Error::new(Kind::Config, error).expected("a loopback address, or --insecure", open));
        }
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
        let hosts = Hosts::new(text, address.port());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (close, closed) = oneshot::channel();
        let work = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve::serve(listeners, Arc::new(hosts), subject) => {}
                    _ = closed => {}
                }
            });
            // Ends the connections, too.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("fastps-web".to_owned()).spawn(work).map_err(failed)?;
        Ok(Some(Self { address, close: Some(close), thread: Some(thread) }))
    }

    /// The address, with the actual port.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
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
