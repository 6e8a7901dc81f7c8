//! Runs a client's tasks: on the thread of a waiting caller, or else on a thread of the client.

use fastps_core::error::{Error, Kind, Result};
use fastps_transport::open_files;
use fastps_transport::wire::Spin;
use std::ops::Deref;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake};
use std::thread::Thread;
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

/// Idle time before the client's thread takes over.
const TAKE_OVER_AFTER: Duration = Duration::from_millis(5);
/// Grace period for closing connections.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(10);

/// The process that something belongs to. Threads, and with them the runtime, do not survive `fork`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn current() -> Self {
        Self(std::process::id())
    }

    /// Fails in a forked child, where no answer would ever arrive.
    pub(crate) fn check(self) -> Result<()> {
        if self == Self::current() {
            return Ok(());
        }
        Err(Error::new(Kind::Connection, "this client was made before fork; connect again in the child"))
    }
}

/// Runs a client's tasks on one thread at a time: on the thread of a caller while it waits, so that an answer
/// wakes no other thread, and on a thread of the client while no caller waits.
#[derive(Debug)]
pub(crate) struct Driver {
    runtime: Owned,
    spin: Mutex<Spin>,
    /// Number of waiting callers, and of callers so far.
    waiting: AtomicUsize,
    callers: AtomicUsize,
    /// Set while the client's thread drives.
    driving: AtomicBool,
    /// Asks the driving thread to yield to a caller.
    let_go: Notify,
    /// Set when there is work that no caller waits for.
    nudged: AtomicBool,
    ended: AtomicBool,
    own: OnceLock<Thread>,
}

impl Driver {
    pub(crate) fn start(spin: Duration) -> Result<Arc<Self>> {
        Spin::check(spin)?;
        let fail = |e| {
            let failed = || Error::new(Kind::Internal, format!("the client's runtime cannot start: {e}"));
            open_files::exhausted(&e).unwrap_or_else(failed)
        };
        // A caller takes each slice before the next is read, so poll for events after every task.
        let driver = Arc::new(Self {
            runtime: Owned::new(
                Builder::new_current_thread().event_interval(1).enable_all().build().map_err(fail)?,
            ),
            spin: Mutex::new(Spin::new(spin)),
            waiting: AtomicUsize::new(0),
            callers: AtomicUsize::new(0),
            driving: AtomicBool::new(false),
            let_go: Notify::new(),
            nudged: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            own: OnceLock::new(),
        });
        let this = driver.clone();
        let own = std::thread::Builder::new().name("fastps-client".to_owned()).spawn(move || this.run());
        let _ = driver.own.set(own.map_err(fail)?.thread().clone());
        Ok(driver)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Does work on this thread, and everything else that the client has to do meanwhile.
    pub(crate) fn drive<T>(&self, work: impl AsyncFnOnce(&mut Spin) -> T) -> T {
        if Handle::try_current().is_ok() {
            // A runtime's thread may not drive another runtime: it sleeps while the client's thread drives.
            self.nudge();
            let _inside = self.runtime.enter();
            return sleep_on(work(&mut Spin::never()));
        }
        let _waiting = Waiting::begin(self);
        let mut spin = *lock(&self.spin);
        let result = self.runtime.block_on(work(&mut spin));
        *lock(&self.spin) = spin;
        result
    }

    /// Does the last work. Does not wait for it within a runtime: its thread may be the one that drives this
    /// client.
    pub(crate) fn finish(&self, work: impl Future + Send + 'static, within: Duration) {
        let work = async move { drop(tokio::time::timeout(within, work).await) };
        if Handle::try_current().is_ok() {
            self.spawn(work);
        } else {
            self.drive(async |_| work.await);
        }
    }

    /// Lets the connections do all work that is ready.
    pub(crate) fn run_once(&self) {
        self.drive(async |_| tokio::task::yield_now().await);
    }

    /// Wakes the client's thread for work that no caller waits for.
    pub(crate) fn nudge(&self) {
        if !self.driving.load(Ordering::SeqCst) {
            self.nudged.store(true, Ordering::SeqCst);
            self.unpark();
        }
    }

    /// Ends the client's thread once the work under way is done.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.let_go.notify_one();
        self.unpark();
    }

    fn unpark(&self) {
        if let Some(own) = self.own.get() {
            own.unpark();
        }
    }

    /// The client's thread.
    fn run(&self) {
        while !self.ended.load(Ordering::SeqCst) {
            self.driving.store(true, Ordering::SeqCst);
            if self.waiting.load(Ordering::SeqCst) == 0 {
                self.runtime.block_on(self.let_go.notified());
            }
            self.driving.store(false, Ordering::SeqCst);
            self.stand_by();
        }
        // Sessions end, and connections close.
        self.runtime.block_on(async { tokio::time::sleep(CLOSE_TIMEOUT).await });
    }

    /// Leaves driving to the callers, as long as they keep coming.
    fn stand_by(&self) {
        loop {
            let before = self.callers.load(Ordering::SeqCst);
            std::thread::park_timeout(TAKE_OVER_AFTER);
            let lull =
                self.waiting.load(Ordering::SeqCst) == 0 && self.callers.load(Ordering::SeqCst) == before;
            if self.nudged.swap(false, Ordering::SeqCst) || lull || self.ended.load(Ordering::SeqCst) {
                return;
            }
        }
    }
}

/// A runtime that may be dropped anywhere, even on a thread that drives another client: Python's garbage
/// collector runs there, too, and tokio's own drop would panic.
#[derive(Debug)]
struct Owned(Option<Runtime>);

impl Owned {
    fn new(runtime: Runtime) -> Self {
        Self(Some(runtime))
    }
}

impl Deref for Owned {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        let Some(runtime) = &self.0 else { unreachable!("only drop takes the runtime") };
        runtime
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Polls a future when it is woken.
fn sleep_on<T>(future: impl Future<Output = T>) -> T {
    struct Sleeper(Thread);
    impl Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Sleeper(std::thread::current())).into();
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => return result,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A caller that waits.
struct Waiting<'a>(&'a Driver);

impl<'a> Waiting<'a> {
    fn begin(driver: &'a Driver) -> Self {
        driver.waiting.fetch_add(1, Ordering::SeqCst);
        driver.callers.fetch_add(1, Ordering::SeqCst);
        if driver.driving.load(Ordering::SeqCst) {
            driver.let_go.notify_one();
        }
        Self(driver)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Locks; a panic of another thread does not matter, because no state is left half-changed across a call.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random number that is not 0.
pub(crate) fn random() -> Result<u64> {
    loop {
        match getrandom::u64() {
            Ok(0) => {}
            Ok(n) => return Ok(n),
            Err(e) => return Err(Error::new(Kind::Internal, format!("no random numbers: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_may_be_dropped_on_a_thread_that_drives_another() {
        let (dropped, other) =
            (Driver::start(Duration::ZERO).unwrap(), Driver::start(Duration::ZERO).unwrap());
        dropped.spawn(std::future::pending());
        dropped.end();
        while Arc::strong_count(&dropped) > 1 {
            std::thread::sleep(Duration::from_millis(1));
        }
        other.drive(async |_| drop(dropped));
        other.end();
    }

    #[test]
    fn a_forked_child_gets_the_way_out() {
        assert!(Process::current().check().is_ok());
        let error = Process(u32::MAX).check().unwrap_err();
        assert!(error.message.contains("before fork; connect again in the child"));
    }
}
