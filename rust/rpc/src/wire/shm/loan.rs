//! Values that are read where they lie: the server lends them, the client copies them to where they belong and gives them back.
//!
//! What is lent stays pinned in its slice until it is back, so that nobody writes there. The socket's end gives back all: a
//! client's end of it stays open as long as anything is borrowed, and a server that closes its own holds what it has lent until the
//! client has closed its end, too.

use super::memory::{Half, LOANS, Values};
use super::ring::{give_back, is_back};
use super::sync::Ordering;
use fastps_core::shard::Exposed;
use fastps_proto::v1 as pb;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::net::UnixStream;
use tokio::runtime::Handle;

/// Wakes the peer. Where the socket has no room for another byte, there are some that it has not read; where it has
/// ended, so will the stream.
pub(super) fn wake(socket: impl AsFd) {
    let _ = send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// The server's end.
pub(crate) struct Lender {
    /// The ring that the client writes.
    half: Half,
    exposed: Arc<Exposed>,
    lent: Mutex<[Option<Kept>; LOANS]>,
}

/// What keeps values as they are.
type Kept = Box<dyn Send>;

impl Lender {
    pub(super) fn new(half: Half, exposed: Arc<Exposed>) -> Arc<Self> {
        Arc::new(Self { half, exposed, lent: Mutex::default() })
    }

    /// Lends `bytes` values that begin at `offset` and stay as they are while `kept` lives; gives it back if so much is lent that there
    /// is no slot.
    pub(crate) fn lend<T: Send + 'static>(
        &self,
        offset: usize,
        bytes: usize,
        kept: T,
    ) -> std::result::Result<pb::Lent, T> {
        self.take_back();
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = lent.iter().position(Option::is_none) else {
            return Err(kept);
        };
        self.half.loan(slot).store(1, Ordering::Relaxed);
        lent[slot] = Some(Box::new(kept));
        Ok(pb::Lent { offset: offset as u64, bytes: bytes as u32, slot: slot as u32 })
    }

    /// Lets go of what the client has given back; tells whether anything is lent still.
    pub(super) fn take_back(&self) -> bool {
        let mut back = [const { None }; LOANS];
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, (lent, back)) in lent.iter_mut().zip(&mut back).enumerate() {
            if lent.is_some() && is_back(&self.half, slot) {
                *back = lent.take();
            }
        }
        let left = lent.iter().any(Option::is_some);
        drop(lent);
        // Those who wait for it are woken without the lock.
        drop(back);
        left
    }

    /// After the connection: holds what is lent until the client has closed its end of the socket.
    pub(super) fn outlive(self: &Arc<Self>, socket: &UnixStream) {
        if !self.take_back() {
            return;
        }
        let left = Left(self.clone(), false);
        let socket = socket.as_fd().try_clone_to_owned().map(std::os::unix::net::UnixStream::from);
        if let (Ok(runtime), Ok(socket)) = (Handle::try_current(), socket) {
            runtime.spawn(left.wait(socket));
        }
    }
}

impl fmt::Debug for Lender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lender").finish_non_exhaustive()
    }
}

/// What is lent after its connection has ended, and whether all of it is back.
struct Left(Arc<Lender>, bool);

impl Left {
    async fn wait(mut self, socket: std::os::unix::net::UnixStream) {
        let _ = shutdown(&socket, Shutdown::Write);
        if let Ok(socket) = UnixStream::from_std(socket) {
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
            self.1 = true;
        }
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        if !self.1 {
            // Nobody is there to wait: what the client reads must outlive this server.
            self.0.exposed.keep();
        }
    }
}

/// The client's end.
#[derive(Debug)]
pub(crate) struct Borrower {
    /// The ring that the server reads.
    half: Half,
    values: Values,
    /// Keeps the client's end open.
    socket: OwnedFd,
}

impl Borrower {
    pub(super) fn new(half: Half, values: &OwnedFd, socket: &UnixStream) -> Result<Arc<Self>> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        Ok(Arc::new(Self { half, values: Values::map(values)?, socket }))
    }

    /// Takes what the server has lent.
    pub(crate) fn take(self: &Arc<Self>, lent: &pb::Lent) -> Result<Loan> {
        let (at, len, slot) = (lent.offset as usize, lent.bytes as usize, lent.slot as usize);
        if slot >= LOANS || at.checked_add(len).is_none_or(|end| end > self.values.len()) {
            let why = format!("the server lends {len} bytes at {at}, to be given back by counter {slot}");
            return Err(Error::new(ErrorKind::InvalidData, why));
        }
        Ok(Loan { from: self.clone(), at, len, slot })
    }
}

/// Borrowed values; dropped, they are given back.
#[derive(Debug)]
pub(crate) struct Loan {
    from: Arc<Borrower>,
    at: usize,
    len: usize,
    slot: usize,
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        self.from.values.bytes(self.at, self.len)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        give_back(&self.from.half, self.slot, || wake(&self.from.socket));
    }
}

#[cfg(test)]
mod tests {
    use super::super::LocalStream;
    use super::*;
    use crate::wire::SPIN;
    use fastps_core::dtype::DType;
    use fastps_core::isa::Isa;
    use fastps_core::optim::{Optimizer, Sgd};
    use fastps_core::shard::{Shard, ShardConfig};
    use fastps_core::slice::Standing;
    use fastps_core::tensor::{Apply, SliceId, TensorSpec};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::time::Duration;
    use tokio::io::AsyncReadExt;

    /// Counts how many there are.
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
    fn shard(slices: u64) -> (Arc<Exposed>, Shard) {
        let exposed = Exposed::new(64 << 20).unwrap();
        let config = ShardConfig::new(0, 64 << 20, Isa::best());
        let shard = Shard::new(ShardConfig { exposed: Some(exposed.clone()), ..config });
        let spec = TensorSpec {
            name: "w".into(),
            shape: vec![slices * DType::Float32.slice_len() as u64],
            dtype: DType::Float32,
            apply: Apply::Exact,
            group: "default".into(),
            optimizer: Optimizer::Sgd(Sgd::default()),
        };
        let slices: Vec<_> = (0..slices).map(|k| (SliceId(k), k as usize)).collect();
        shard.create(&Arc::new(spec), 0, &slices).unwrap();
        for (slice, k) in slices {
            let slice = shard.slice(slice).unwrap();
            slice.restore(&Standing::default(), &vec![k as u8 + 1; slice.bytes()], &[]).unwrap();
        }
        (exposed, shard)
    }

    /// A client and a server on this machine.
    async fn pair(exposed: &Arc<Exposed>) -> (LocalStream, LocalStream) {
        let (client, server) = UnixStream::pair().unwrap();
        let (mut client, mut server) = (LocalStream::from(client), LocalStream::from(server));
        let serve = async {
            let mut question = vec![0; super::super::ASK.len()];
            server.read_exact(&mut question).await.unwrap();
            server.share(Ok(()), SPIN, Some(exposed)).await.unwrap();
            server
        };
        let (answer, server) = within(async { tokio::join!(client.ask(SPIN), serve) }).await;
        answer.unwrap().unwrap();
        (client, server)
    }

    fn lend<T: Send + 'static>(server: &LocalStream, shard: &Shard, slice: u64, kept: T) -> Option<pb::Lent> {
        let values = shard.pull(0, SliceId(slice)).unwrap();
        let (offset, bytes) = (values.exposed_at().unwrap(), values.as_ref().len());
        server.lender().unwrap().lend(offset, bytes, (values, kept)).ok()
    }

    #[tokio::test]
    async fn values_are_read_where_they_lie_and_given_back() {
        let (exposed, shard) = shard(2);
        let (client, server) = pair(&exposed).await;
        let (borrower, kept) = (client.borrower().unwrap(), count());
        let mut loans = Vec::new();
        for _ in 0..LOANS {
            let lent = lend(&server, &shard, 1, Counted::new(kept)).unwrap();
            loans.push(borrower.take(&lent).unwrap());
        }
        assert!(lend(&server, &shard, 1, ()).is_none(), "as much is lent as can be");
        let values = shard.pull(0, SliceId(1)).unwrap();
        assert!(values.as_ref().iter().all(|byte| *byte == 2));
        assert!(loans.iter().all(|loan| loan.as_ref() == values.as_ref()));
        // In any order.
        loans.swap_remove(1);
        assert_eq!(kept.load(SeqCst), LOANS, "nobody has looked yet");
        loans.push(borrower.take(&lend(&server, &shard, 0, Counted::new(kept)).unwrap()).unwrap());
        assert_eq!(kept.load(SeqCst), LOANS, "one is back, and one is lent");
        loans.clear();
        assert!(!server.lender().unwrap().take_back());
        assert_eq!(kept.load(SeqCst), 0);
    }

    #[tokio::test]
    async fn a_lender_that_sleeps_hears_of_what_is_given_back() {
        let (exposed, shard) = shard(1);
        let (client, mut server) = pair(&exposed).await;
        let (borrower, kept) = (client.borrower().unwrap(), count());
        server.never_spin();
        for pause in [0, 20, 0, 20] {
            let lent = lend(&server, &shard, 0, Counted::new(kept)).unwrap();
            let loan = borrower.take(&lent).unwrap();
            let back = async {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                drop(loan);
                until("it is back", || kept.load(SeqCst) == 0).await;
            };
            tokio::select! {
                () = back => {}
                _ = server.read_u8() => panic!("nothing was sent"),
            }
        }
    }

    #[tokio::test]
    async fn what_is_lent_stays_as_it_is_until_the_clients_end_is_closed() {
        let (exposed, shard) = shard(1);
        let (mut client, server) = pair(&exposed).await;
        let kept = count();
        let lent = lend(&server, &shard, 0, Counted::new(kept)).unwrap();
        let loan = client.borrower().unwrap().take(&lent).unwrap();
        drop(server);
        assert!(within(client.read_u8()).await.is_err(), "the client sees the end");
        drop(client);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(kept.load(SeqCst), 1, "it is read still");
        assert!(loan.as_ref().iter().all(|byte| *byte == 1));
        drop(loan);
        until("the client's end is closed", || kept.load(SeqCst) == 0).await;
    }

    #[test]
    fn what_is_read_when_the_server_stops_is_never_used_again() {
        let (exposed, shard) = shard(1);
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (clients, servers) = (runtime(), runtime());
        let (client, server) = clients.block_on(pair(&exposed));
        let lent = lend(&server, &shard, 0, ()).unwrap();
        let loan = client.borrower().unwrap().take(&lent).unwrap();
        {
            let _inside = servers.enter();
            drop(server);
        }
        drop(servers);
        drop((shard, exposed));
        assert!(loan.as_ref().iter().all(|byte| *byte == 1));
        drop(clients);
    }

    #[tokio::test]
    async fn nonsense_is_refused() {
        let (exposed, shard) = shard(1);
        let (client, server) = pair(&exposed).await;
        let borrower = client.borrower().unwrap();
        let good = lend(&server, &shard, 0, ()).unwrap();
        for bad in [
            pb::Lent { slot: LOANS as u32, ..good },
            pb::Lent { offset: 64 << 20, ..good },
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
