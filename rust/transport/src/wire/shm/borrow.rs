//! Lends values without sending them: the client reads them in the server's memory, copies them, and returns
//! them.
//!
//! A lent slice stays pinned until it is returned, so no push writes to it. Closing the socket returns
//! everything: a client keeps its end open while it borrows anything, and a server that closes its end keeps
//! lent values pinned until the client has closed its end, too.

use super::memory::{Half, MAX_BORROWED_PAGES, Values};
use super::pass;
use super::ring::{give_back, is_back};
use super::sync::Ordering;
use fastps_core::slice::Snapshot;
use fastps_proto::v1 as pb;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::runtime::Handle;

/// Wakes the peer. A full socket has bytes that the peer has not read yet; a closed one ends the stream.
pub(super) fn wake(socket: impl AsFd) {
    let _ = send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// The server's end.
pub struct Lender {
    /// The ring that the client writes.
    half: Half,
    state: Mutex<LenderState>,
}

struct LenderState {
    lent: [Option<Lent>; MAX_BORROWED_PAGES],
    /// The files that the client has got, by their offset.
    passed: HashSet<u64>,
    /// A second handle of the server's end of the socket, held as long as the connection lasts.
    socket: Option<UnixStream>,
}

/// Lent values, and their reserved place.
type Lent = (KeptValues, Box<dyn Send>);

/// Values that a client may read, and the memory that is taken for them as long as it may.
struct KeptValues {
    _values: Snapshot,
    _memory: Box<dyn Send>,
}

impl Lender {
    pub(super) fn new(half: Half, socket: &tokio::net::UnixStream) -> Result<Arc<Self>> {
        let socket = Some(UnixStream::from(socket.as_fd().try_clone_to_owned()?));
        let lent = [const { None }; MAX_BORROWED_PAGES];
        let state = Mutex::new(LenderState { lent, passed: HashSet::new(), socket });
        Ok(Arc::new(Self { half, state }))
    }

    fn state(&self) -> MutexGuard<'_, LenderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends values, and keeps `place` until they are returned; the client gets their file before its first
    /// values. Refuses, and returns both, if their memory is not shared or its file cannot be passed, if no
    /// slot is free, if `memory` takes none, and after the end. The memory is kept as long as the client may
    /// read the values.
    pub fn lend<T: Send + 'static, M: Send + 'static>(
        &self,
        values: Snapshot,
        place: T,
        memory: impl FnOnce() -> Option<M>,
    ) -> std::result::Result<pb::Lent, (Snapshot, T)> {
        self.take_back();
        let mut state = self.state();
        let slot = state.lent.iter().position(Option::is_none);
        let (Some((file, offset)), Some(slot), Some(socket)) = (values.exposed_at(), slot, &state.socket)
        else {
            return Err((values, place));
        };
        let Some(memory) = memory() else {
            return Err((values, place));
        };
        if !state.passed.contains(&file.offset()) {
            if pass::hand(socket, file.readable().as_fd()).is_err() {
                return Err((values, place));
            }
            state.passed.insert(file.offset());
        }
        let lent = pb::Lent { offset, bytes: values.as_ref().len() as u32, slot: slot as u32 };
        self.half.borrowed(slot).store(1, Ordering::Relaxed);
        let values = KeptValues { _values: values, _memory: Box::new(memory) };
        state.lent[slot] = Some((values, Box::new(place)));
        Ok(lent)
    }

    /// Releases the values that the client has returned.
    pub(super) fn take_back(&self) {
        let mut back = [const { None }; MAX_BORROWED_PAGES];
        let mut state = self.state();
        for (slot, (lent, back)) in state.lent.iter_mut().zip(&mut back).enumerate() {
            *back = lent.take_if(|_| is_back(&self.half, slot));
        }
        drop(state);
        // Wakes those who wait for a place without holding the lock.
        drop(back);
    }

    /// Handles the connection's end: lent values stay pinned until the client has closed its end of the
    /// socket, but no longer occupy a place.
    pub(super) fn end(&self) {
        self.take_back();
        let mut state = self.state();
        let (lent, socket) = (std::mem::take(&mut state.lent), state.socket.take());
        drop(state);
        let values: Vec<_> = lent.into_iter().flatten().map(|(values, _place)| values).collect();
        if values.is_empty() {
            return;
        }
        let left = Left { values };
        if let (Ok(runtime), Some(socket)) = (Handle::try_current(), socket) {
            runtime.spawn(left.wait(socket));
        }
    }
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").finish_non_exhaustive()
    }
}

/// Values still lent after their connection has ended.
struct Left {
    values: Vec<KeptValues>,
}

impl Left {
    async fn wait(mut self, socket: UnixStream) {
        let _ = shutdown(&socket, Shutdown::Write);
        let Ok(socket) = tokio::net::UnixStream::from_std(socket) else { return };
        loop {
            match socket.try_read(&mut [0; 64]) {
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if socket.readable().await.is_err() {
                        return;
                    }
                }
                Ok(0) | Err(_) => break,
            }
        }
        self.values.clear();
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        // No task is left to wait for a client that may still read: leak these few slices.
        std::mem::forget(std::mem::take(&mut self.values));
    }
}

/// The client's end.
#[derive(Debug)]
pub struct Borrower {
    /// The ring that the server reads.
    half: Half,
    /// The files that the server has passed, by their offset.
    files: Mutex<BTreeMap<u64, Arc<Values>>>,
    /// Larger memory of the rings, until the stream takes it.
    rings: Mutex<Option<OwnedFd>>,
    /// Why this process could not map one.
    trouble: OnceLock<Error>,
    /// Keeps the client's end open.
    socket: OwnedFd,
}

impl Borrower {
    pub(super) fn new(half: Half, socket: &tokio::net::UnixStream) -> Result<Arc<Self>> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let (files, rings, trouble) = Default::default();
        Ok(Arc::new(Self { half, files, rings, trouble, socket }))
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Values>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives bytes that wake this end, and maps the file beside them if there is one. Returns the number
    /// of bytes.
    pub(super) fn receive(&self) -> Result<usize> {
        let mut bytes = [0; 64];
        let (n, file) = pass::receive(&self.socket, &mut bytes)?;
        if pass::is_rings(&bytes[..n])
            && let Some(rings) = file
        {
            *self.rings.lock().unwrap_or_else(PoisonError::into_inner) = Some(rings?);
            return Ok(n);
        }
        match file.map(|file| Values::map(&file?)) {
            Some(Ok(file)) => {
                self.forget_gone();
                self.files().insert(file.offset(), Arc::new(file));
            }
            // Its values end the connection, if any are lent.
            Some(Err(error)) => drop(self.trouble.set(error)),
            None => {}
        }
        Ok(n)
    }

    /// Larger memory of the rings, if the server has passed it.
    pub(super) fn take_rings(&self) -> Option<OwnedFd> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether the server has passed files whose values may be borrowed.
    pub(super) fn has_files(&self) -> bool {
        !self.files().is_empty()
    }

    /// Unmaps files that the server has given back.
    pub fn forget_gone(&self) {
        self.files().retain(|_, file| !file.is_gone());
    }

    /// The file with these bytes, and their place in it.
    fn find(&self, offset: u64, len: usize) -> Option<(Arc<Values>, usize)> {
        let files = self.files();
        let (first, file) = files.range(..=offset).next_back()?;
        let at = usize::try_from(offset - first).ok()?;
        (at.checked_add(len)? <= file.len()).then(|| (file.clone(), at))
    }

    /// Takes the values that the server has lent. It has passed their file before.
    pub fn take(self: &Arc<Self>, lent: &pb::Lent) -> Result<BorrowedPage> {
        let (offset, len, slot) = (lent.offset, lent.bytes as usize, lent.slot as usize);
        let mut found = self.find(offset, len);
        while found.is_none() {
            match self.receive() {
                Ok(1..) => found = self.find(offset, len),
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                _ => break,
            }
        }
        let Some((values, at)) = found.filter(|_| slot < MAX_BORROWED_PAGES) else {
            let lent = format!("the server lends {len} bytes at {offset}, to be returned by counter {slot}");
            let why = self.trouble.get().map_or(lent, Error::to_string);
            return Err(Error::new(ErrorKind::InvalidData, why));
        };
        Ok(BorrowedPage { from: self.clone(), values, at, len, slot })
    }
}

/// Borrowed values; dropping returns them.
#[derive(Debug)]
pub struct BorrowedPage {
    from: Arc<Borrower>,
    values: Arc<Values>,
    at: usize,
    len: usize,
    slot: usize,
}

impl AsRef<[u8]> for BorrowedPage {
    fn as_ref(&self) -> &[u8] {
        self.values.bytes(self.at, self.len)
    }
}

impl Drop for BorrowedPage {
    fn drop(&mut self) {
        give_back(&self.from.half, self.slot, || wake(&self.from.socket));
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::super::{LocalStream, Rings};
    use super::*;
    use crate::wire::DEFAULT_SPIN;
    use fastps_core::dtype::DType;
    use fastps_core::isa::Isa;
    use fastps_core::optim::{Optimizer, Sgd};
    use fastps_core::shard::{Exposed, Shard, ShardConfig};
    use fastps_core::slice::Standing;
    use fastps_core::tensor::{SliceId, TensorSpec};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Counts live values.
    struct Counted<'a>(&'a AtomicUsize);

    impl<'a> Counted<'a> {
        fn new(count: &'a AtomicUsize) -> Self {
            count.fetch_add(1, SeqCst);
            Self(count)
        }
    }

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    fn count() -> &'static AtomicUsize {
        Box::leak(Box::default())
    }

    async fn within<T>(work: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(30), work).await.expect("nothing moves")
    }

    async fn until(what: &str, is: impl Fn() -> bool) {
        let waiting = async {
            while !is() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// A shard with `slices` whole slices whose bytes are their numbers, counted from 1.
    fn shard(slices: u64) -> Shard {
        let config = ShardConfig::new(0, 64 << 20, Isa::best());
        let shard = Shard::new(ShardConfig { exposed: Some(Exposed::new(64 << 20).unwrap()), ..config });
        let spec = TensorSpec::new(
            "w",
            vec![slices * DType::Float32.slice_len() as u64],
            Optimizer::Sgd(Sgd::default()),
        );
        let slices: Vec<_> = (0..slices).map(|k| (SliceId(k), k as usize)).collect();
        shard.create(&Arc::new(spec), 0, &slices).unwrap();
        for (slice, k) in slices {
            let slice = shard.slice(slice).unwrap();
            slice.restore(&Standing::default(), &vec![k as u8 + 1; slice.bytes()], &[]).unwrap();
        }
        shard
    }

    /// A client and a server on this machine.
    async fn pair() -> (LocalStream, LocalStream) {
        let (client, server) = tokio::net::UnixStream::pair().unwrap();
        let (mut client, mut server) = (LocalStream::from(client), LocalStream::from(server));
        let serve = async {
            let mut question = vec![0; super::super::ASK.len() + 1];
            server.read_exact(&mut question).await.unwrap();
            server.share(Ok(Rings::Whole), DEFAULT_SPIN, true).await.unwrap();
            server
        };
        let (answer, server) = within(async { tokio::join!(client.ask(None, DEFAULT_SPIN), serve) }).await;
        answer.unwrap().unwrap();
        (client, server)
    }

    fn lend<T: Send + 'static>(
        server: &LocalStream,
        shard: &Shard,
        slice: u64,
        place: T,
    ) -> Option<pb::Lent> {
        server.lender().unwrap().lend(shard.pull(0, SliceId(slice)).unwrap(), place, || Some(())).ok()
    }

    #[tokio::test]
    async fn values_are_read_where_they_lie_and_given_back() {
        let shard = shard(2);
        let (client, server) = pair().await;
        let (borrower, kept) = (client.borrower().unwrap(), count());
        let mut pages = Vec::new();
        for _ in 0..MAX_BORROWED_PAGES {
            let lent = lend(&server, &shard, 1, Counted::new(kept)).unwrap();
            pages.push(borrower.take(&lent).unwrap());
        }
        assert!(lend(&server, &shard, 1, ()).is_none(), "as much is lent as can be");
        let values = shard.pull(0, SliceId(1)).unwrap();
        assert!(values.as_ref().iter().all(|byte| *byte == 2));
        assert!(pages.iter().all(|page| page.as_ref() == values.as_ref()));
        // In any order.
        pages.swap_remove(1);
        assert_eq!(kept.load(SeqCst), MAX_BORROWED_PAGES, "the lender has not looked yet");
        pages.push(borrower.take(&lend(&server, &shard, 0, Counted::new(kept)).unwrap()).unwrap());
        assert_eq!(kept.load(SeqCst), MAX_BORROWED_PAGES, "one is back, and one is lent");
        pages.clear();
        server.lender().unwrap().take_back();
        assert_eq!(kept.load(SeqCst), 0);
    }

    #[tokio::test]
    async fn a_lender_that_sleeps_hears_of_what_is_given_back() {
        let shard = shard(1);
        let (client, mut server) = pair().await;
        let (borrower, kept) = (client.borrower().unwrap(), count());
        server.never_spin();
        for pause in [0, 20, 0, 20] {
            let lent = lend(&server, &shard, 0, Counted::new(kept)).unwrap();
            let page = borrower.take(&lent).unwrap();
            let back = async {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                drop(page);
                until("it is back", || kept.load(SeqCst) == 0).await;
            };
            tokio::select! {
                () = back => {}
                _ = server.read_u8() => panic!("nothing was sent"),
            }
        }
    }

    /// Returns whether only the slice itself has its values, so that a push may write there.
    fn is_free(shard: &Shard) -> bool {
        let at = || shard.pull(0, SliceId(0)).unwrap().exposed_at().map(|(_, offset)| offset);
        let before = at();
        let slice = shard.slice(SliceId(0)).unwrap();
        slice.restore(&Standing::default(), &vec![1; slice.bytes()], &[]).unwrap();
        at() == before
    }

    #[tokio::test]
    async fn what_is_lent_stays_as_it_is_until_the_clients_end_is_closed() {
        let shard = shard(1);
        let (mut client, server) = pair().await;
        let (kept, memory, lender) = (count(), count(), server.lender().unwrap());
        assert!(is_free(&shard));
        let values = || shard.pull(0, SliceId(0)).unwrap();
        assert!(lender.lend(values(), (), || None::<()>).is_err(), "there is no memory");
        let lent = lender.lend(values(), Counted::new(kept), || Some(Counted::new(memory))).ok().unwrap();
        let page = client.borrower().unwrap().take(&lent).unwrap();
        drop(server);
        assert_eq!(kept.load(SeqCst), 0, "it takes no place");
        assert!(lender.lend(values(), (), || Some(())).is_err(), "nothing is lent after the end");
        assert!(within(client.read_u8()).await.is_err(), "the client sees the end");
        client.shutdown().await.unwrap();
        drop(client);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!is_free(&shard), "it is read still");
        assert_eq!(memory.load(SeqCst), 1, "and takes memory");
        assert!(page.as_ref().iter().all(|byte| *byte == 1));
        drop(page);
        until("the client's end is closed", || memory.load(SeqCst) == 0).await;
        assert!(is_free(&shard));
    }

    #[test]
    fn what_is_read_when_the_server_stops_is_never_used_again() {
        let shard = shard(1);
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (clients, servers) = (runtime(), runtime());
        let (client, server) = clients.block_on(pair());
        let lent = lend(&server, &shard, 0, ()).unwrap();
        let page = client.borrower().unwrap().take(&lent).unwrap();
        {
            let _inside = servers.enter();
            drop(server);
        }
        drop(servers);
        drop(shard);
        assert!(page.as_ref().iter().all(|byte| *byte == 1));
        drop(clients);
    }

    #[tokio::test]
    async fn nonsense_is_refused() {
        let shard = shard(1);
        let (client, server) = pair().await;
        let borrower = client.borrower().unwrap();
        let good = lend(&server, &shard, 0, ()).unwrap();
        for bad in [
            pb::Lent { slot: MAX_BORROWED_PAGES as u32, ..good },
            pb::Lent { offset: (64 << 20) - 4096, ..good },
            pb::Lent { offset: (64 << 20) + 4096, ..good },
            pb::Lent { offset: u64::MAX, ..good },
            pb::Lent { bytes: u32::MAX, ..good },
        ] {
            let error = borrower.take(&bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
        assert!(borrower.take(&good).is_ok());
        let open = rustix::fs::memfd_create(c"open", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(Values::map(&open).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
