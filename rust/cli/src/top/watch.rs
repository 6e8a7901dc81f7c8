//! Looks at the cluster and the keyboard, each on a thread of its own: neither waits for the other, or for a
//! shard that answers late.

use crate::addresses::with_addresses;
use crate::credentials::Credentials;
use crate::signals::Signals;
use fastps_client::{ClusterView, inspect};
use fastps_core::error::Result;
use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Time after which the thread of the keyboard sees that it is no longer needed.
const KEY_POLL: Duration = Duration::from_millis(100);

/// An event of a watched cluster or its watcher.
#[derive(Debug)]
pub(super) enum Event {
    /// A look at the cluster, and its time.
    Looked(Result<ClusterView>, Instant),
    Key(KeyEvent),
    Resized,
    /// A signal, or the terminal is gone.
    Stop,
}

/// The events.
pub(super) struct Watch {
    events: UnboundedReceiver<Event>,
    send: UnboundedSender<Event>,
    over: Arc<AtomicBool>,
    stop: Pin<Box<dyn Future<Output = ()>>>,
}

impl Watch {
    /// Begins to look at a cluster; times: between two looks, and for an answer.
    pub(super) fn start(
        addresses: Vec<String>,
        credentials: Credentials,
        (interval, timeout): (Duration, Duration),
    ) -> io::Result<Self> {
        let (send, events) = unbounded_channel();
        let (tls, mut signals) = (credentials.tls(), Signals::catch()?);
        let stop = async move { signals.stop(None::<fn()>).await };
        let watch = Self { events, send, over: Arc::default(), stop: Box::pin(stop) };
        watch.spawn("fastps-look", move |send, over| {
            let mut silent = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let (at, token) = (Instant::now(), credentials.token_file.as_deref());
                let found = with_addresses(addresses.clone(), |addresses| {
                    inspect(addresses, &tls, token, timeout, &silent)
                });
                silent = found.as_ref().map(ClusterView::silent).unwrap_or_default();
                if send.send(Event::Looked(found, at)).is_err() {
                    return;
                }
                std::thread::sleep(interval.saturating_sub(at.elapsed()));
            }
        })?;
        Ok(watch)
    }

    /// Also reads the keyboard.
    pub(super) fn read_keys(&self) -> io::Result<()> {
        self.spawn("fastps-keys", |send, over| {
            while !over.load(Ordering::Relaxed) {
                let read = event::poll(KEY_POLL).and_then(|any| any.then(event::read).transpose());
                let event = match read {
                    Ok(Some(event::Event::Key(key))) if key.kind == KeyEventKind::Press => Event::Key(key),
                    Ok(Some(event::Event::Resize(..))) => Event::Resized,
                    Ok(_) => continue,
                    Err(_) => Event::Stop,
                };
                let ends = matches!(event, Event::Stop);
                if send.send(event).is_err() || ends {
                    return;
                }
            }
        })
    }

    fn spawn(
        &self,
        name: &str,
        work: impl FnOnce(&UnboundedSender<Event>, &AtomicBool) + Send + 'static,
    ) -> io::Result<()> {
        let (send, over) = (self.send.clone(), self.over.clone());
        std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&send, &over)).map(drop)
    }

    /// The next event.
    pub(super) async fn next(&mut self) -> Event {
        tokio::select! {
            () = &mut self.stop => Event::Stop,
            event = self.events.recv() => event.unwrap_or(Event::Stop),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
