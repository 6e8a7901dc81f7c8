//! The shared-memory ring, compiled from `rust/transport/src/wire/shm/ring.rs` itself with loom's atomics and
//! two bytes of memory, in every relevant order of its two ends' steps. No byte may be lost, read early or
//! overwritten, and no end may sleep for ever. Each model also runs with seeded faults, which loom must find.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::panic,
    clippy::unused_self,
    reason = "the ring is a module of the test here; helpers of tests, too, fail by panicking"
)]

#[path = "../src/wire/shm/ring.rs"]
mod ring;

use loom::sync::Notify;
use loom::thread;
use memory::Half;
use ring::{Reader, Writer, give_back, is_back};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tokio::io::ReadBuf;

thread_local! {
    /// One real thread runs all threads of a model.
    static FAULT: Cell<&'static str> = const { Cell::new("") };
}

fn fault(name: &str) -> bool {
    FAULT.get() == name
}

mod sync {
    pub use loom::sync::atomic::{AtomicU32, Ordering};

    pub fn fence(ordering: Ordering) {
        if !super::fault("no fence") {
            loom::sync::atomic::fence(ordering);
        }
    }

    /// A count.
    #[derive(Debug)]
    pub struct AtomicU64(pub loom::sync::atomic::AtomicU64);

    impl AtomicU64 {
        pub fn load(&self, ordering: Ordering) -> u64 {
            self.0.load(ordering)
        }

        pub fn store(&self, value: u64, ordering: Ordering) {
            let ordering = if super::fault("counts in any order") { Ordering::Relaxed } else { ordering };
            self.0.store(value, ordering);
        }
    }
}

/// A ring of two bytes, which may grow to four.
mod memory {
    use super::sync::{AtomicU32, AtomicU64, Ordering};
    use loom::sync::atomic::AtomicU8;
    use std::sync::Arc;
    use tokio::io::ReadBuf;

    #[derive(Debug)]
    pub struct Control {
        pub written: AtomicU64,
        pub read: AtomicU64,
        pub reader_sleeps: AtomicU32,
        pub writer_sleeps: AtomicU32,
        pub lent: AtomicU32,
    }

    #[derive(Debug)]
    pub struct Growth {
        pub moved: AtomicU64,
        pub is_wanted: AtomicU32,
    }

    #[derive(Clone, Debug)]
    pub struct Half {
        control: Arc<(Control, Growth)>,
        memory: Arc<Vec<AtomicU8>>,
        larger: Option<usize>,
    }

    impl Half {
        pub fn new() -> Self {
            let count = || AtomicU64(loom::sync::atomic::AtomicU64::new(0));
            let control = Control {
                written: count(),
                read: count(),
                reader_sleeps: AtomicU32::new(0),
                writer_sleeps: AtomicU32::new(0),
                lent: AtomicU32::new(1),
            };
            let growth = Growth { moved: count(), is_wanted: AtomicU32::new(0) };
            Self { control: Arc::new((control, growth)), memory: bytes(2), larger: None }
        }

        /// A ring that grows, and the memory that it moves to.
        pub fn growing() -> [Self; 2] {
            let small = Self { larger: Some(4), ..Self::new() };
            let larger = Self { control: small.control.clone(), memory: bytes(4), larger: None };
            [small, larger]
        }

        pub fn size(&self) -> usize {
            self.memory.len()
        }

        pub fn larger_size(&self) -> Option<usize> {
            self.larger
        }

        pub fn control(&self) -> &Control {
            &self.control.0
        }

        pub fn growth(&self) -> &Growth {
            &self.control.1
        }

        pub fn borrowed(&self, _slot: usize) -> &AtomicU32 {
            &self.control().lent
        }

        pub fn put(&self, position: u64, bytes: &[u8]) {
            for (at, byte) in (position..).zip(bytes) {
                self.memory[at as usize % self.size()].store(*byte, Ordering::Relaxed);
            }
        }

        pub fn get(&self, position: u64, n: usize, into: &mut ReadBuf<'_>) {
            for at in position..position + n as u64 {
                into.put_slice(&[self.memory[at as usize % self.size()].load(Ordering::Relaxed)]);
            }
        }
    }

    fn bytes(n: usize) -> Arc<Vec<AtomicU8>> {
        Arc::new((0..n).map(|_| AtomicU8::new(0)).collect())
    }
}

/// Checks a model, and that loom finds each seeded fault in it.
fn check(name: &str, faults: &[&'static str], model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(model);
    for fault in faults {
        FAULT.set(fault);
        let found = catch_unwind(AssertUnwindSafe(|| builder.check(model))).is_err();
        FAULT.set("");
        assert!(found, "loom does not find {fault} in {name}");
    }
}

/// Replaces the socket between the two ends: ringing it wakes the waiting end.
#[derive(Clone)]
struct Bell(Arc<Notify>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new(Notify::new()))
    }

    fn ring(&self) {
        if !fault("no wake-up") {
            self.0.notify();
        }
    }
}

fn may_sleep(ask: impl FnOnce() -> std::io::Result<bool>) -> bool {
    fault("no sleeping flag") || ask().unwrap() || fault("no second look")
}

/// Writes all bytes, sleeping while the ring is full, as `stream` does.
fn write(writer: &mut Writer, mut bytes: &[u8], mine: &Bell, peer: &Bell) {
    while !bytes.is_empty() {
        let n = writer.write([bytes], || peer.ring()).unwrap();
        bytes = &bytes[n..];
        if n == 0 && may_sleep(|| writer.may_sleep()) {
            mine.0.wait();
        }
    }
}

/// Reads `n` bytes, sleeping while the ring is empty.
fn read(reader: &mut Reader, n: usize, mine: &Bell, peer: &Bell) -> Vec<u8> {
    let mut bytes = vec![0; n];
    let mut buffer = ReadBuf::new(&mut bytes);
    while buffer.remaining() > 0 {
        let before = buffer.remaining();
        reader.read(&mut buffer, || peer.ring()).unwrap();
        if buffer.remaining() == before && may_sleep(|| reader.may_sleep()) {
            mine.0.wait();
        }
    }
    bytes
}

const FAULTS: &[&str] =
    &["no fence", "counts in any order", "no wake-up", "no sleeping flag", "no second look"];

#[test]
fn all_bytes_arrive_in_order() {
    check("a message longer than the ring", FAULTS, || {
        let half = Half::new();
        let (mut writer, mut reader) = (Writer::new(half.clone()), Reader::new(half));
        let (writers, readers) = (Bell::new(), Bell::new());
        let other = thread::spawn({
            let (mine, peer) = (writers.clone(), readers.clone());
            move || write(&mut writer, &[1, 2, 3], &mine, &peer)
        });
        assert_eq!(read(&mut reader, 3, &readers, &writers), [1, 2, 3]);
        other.join().unwrap();
    });
}

#[test]
fn bytes_arrive_in_order_while_a_ring_grows() {
    check("a ring that moves", &["no fence", "no wake-up", "no sleeping flag", "no second look"], || {
        let [half, larger] = Half::growing();
        let (mut writer, mut reader) = (Writer::new(half.clone()), Reader::new(half));
        reader.may_move_to(larger.clone());
        let (writers, readers) = (Bell::new(), Bell::new());
        let other = thread::spawn({
            let (mine, peer) = (writers.clone(), readers.clone());
            move || {
                write(&mut writer, &[1], &mine, &peer);
                writer.move_to(larger);
                write(&mut writer, &[2, 3, 4], &mine, &peer);
            }
        });
        assert_eq!(read(&mut reader, 4, &readers, &writers), [1, 2, 3, 4]);
        other.join().unwrap();
    });
}

#[test]
fn a_question_and_its_answer_meet() {
    check("both directions", &["no fence", "no wake-up", "no second look"], || {
        let (there, back) = (Half::new(), Half::new());
        let (a, b) = (Bell::new(), Bell::new());
        let other = thread::spawn({
            let (mut reader, mut writer) = (Reader::new(there.clone()), Writer::new(back.clone()));
            let (mine, peer) = (b.clone(), a.clone());
            move || {
                let question = read(&mut reader, 1, &mine, &peer);
                write(&mut writer, &[question[0] + 1], &mine, &peer);
            }
        });
        write(&mut Writer::new(there), &[7], &a, &b);
        assert_eq!(read(&mut Reader::new(back), 1, &a, &b), [8]);
        other.join().unwrap();
    });
}

/// The end of the socket comes after all bytes: a reader that sees it checks the ring once more.
#[test]
fn what_was_written_before_the_end_is_read() {
    check("the end", &["no look after the end"], || {
        let half = Half::new();
        let (mut writer, mut reader) = (Writer::new(half.clone()), Reader::new(half));
        let bell = Bell::new();
        let ended = loom::sync::Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let other = thread::spawn({
            let (bell, ended) = (bell.clone(), ended.clone());
            move || {
                writer.write([&[5][..]], || bell.ring()).unwrap();
                ended.store(true, sync::Ordering::Release);
                bell.ring();
            }
        });
        let mut bytes = [0; 2];
        let mut buffer = ReadBuf::new(&mut bytes);
        let mut seen = false;
        loop {
            reader.read(&mut buffer, || {}).unwrap();
            if seen {
                break;
            }
            if reader.may_sleep().unwrap() {
                bell.0.wait();
                seen = ended.load(sync::Ordering::Acquire);
                if seen && fault("no look after the end") {
                    break;
                }
            }
        }
        assert_eq!(buffer.filled(), [5]);
        other.join().unwrap();
    });
}

/// Borrowed values are read before they return to the lender, which overwrites them, and a sleeping lender is
/// woken.
#[test]
fn what_is_lent_comes_back() {
    check("a borrowed page", &["no fence", "no wake-up", "no sleeping flag", "no second look"], || {
        let half = Half::new();
        let mut reader = Reader::new(half.clone());
        let bell = Bell::new();
        let values = Arc::new(sync::AtomicU32::new(7));
        let other = thread::spawn({
            let (half, bell, values) = (half.clone(), bell.clone(), values.clone());
            move || {
                assert_eq!(values.load(sync::Ordering::Relaxed), 7, "it was written while it was lent");
                give_back(&half, 0, || bell.ring());
            }
        });
        while !is_back(&half, 0) {
            if may_sleep(|| reader.may_sleep()) && (fault("no second look") || !is_back(&half, 0)) {
                bell.0.wait();
            }
        }
        values.store(8, sync::Ordering::Relaxed);
        other.join().unwrap();
    });
}

/// A peer with invalid counters ends the stream and reaches nothing beyond the ring.
#[test]
fn counts_that_cannot_be_are_refused() {
    loom::model(|| {
        let order = sync::Ordering::Relaxed;
        let mut bytes = [0; 4];
        for written in [3, 1 << 40, u64::MAX] {
            let half = Half::new();
            let mut reader = Reader::new(half.clone());
            half.control().written.store(written, order);
            let error = reader.read(&mut ReadBuf::new(&mut bytes), || {}).unwrap_err();
            assert!(error.to_string().contains("expected 0 to 2"), "{error}");
        }
        let half = Half::new();
        let (mut writer, mut reader) = (Writer::new(half.clone()), Reader::new(half.clone()));
        assert_eq!(writer.write([&[1, 2, 3][..]], || {}).unwrap(), 2);
        half.control().read.store(3, order);
        assert!(writer.write([&[3][..]], || {}).is_err());
        reader.read(&mut ReadBuf::new(&mut bytes), || {}).unwrap();
        half.control().written.store(1, order);
        let error = reader.read(&mut ReadBuf::new(&mut bytes), || {}).unwrap_err();
        assert!(error.to_string().contains("is 1: expected 2 to 4"), "{error}");
    });
}
