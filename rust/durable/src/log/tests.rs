//! The queue of the log, and its writing thread.

use super::*;
use crate::files::directory::Directory;
use crate::frame::{Author, Origin};
use crate::log::queue::{
    CHUNK_BYTES, EAGER_WRITE_BYTES, IDLE_WRITE_BYTES, MAX_QUEUED_BYTES, MAX_SPARE_CHUNKS, Queue,
};
use crate::log::read::beginning;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);

fn durability_notice(log: &Log) -> Receiver<()> {
    let (tell, durability_notice) = channel();
    log.append(|to| {
        frame::durable(to, 0);
        true
    });
    let then = move || {
        let _ = tell.send(());
    };
    log.when_durable(log.position(), Box::new(then));
    durability_notice
}

#[test]
fn unawaited_frames_are_written_when_callers_idle_or_much_is_pending() {
    let log = Log::new();
    // The thread does not run.
    let _ = log.open(Catalog::default(), Segment::at("/dev/null"), u64::MAX, false);
    let append = |bytes: usize| {
        log.queue().append(|to| {
            to.resize(to.len() + bytes, 0);
            true
        })
    };
    assert!(!append(IDLE_WRITE_BYTES - 1));
    log.rest();
    assert!(!log.queue().is_urgent());
    assert!(!append(1) && !log.queue().is_urgent());
    log.rest();
    assert!(log.queue().is_urgent());
    // The callers are busy again.
    assert!(!append(EAGER_WRITE_BYTES - IDLE_WRITE_BYTES - 1) && !log.queue().is_urgent());
    assert!(append(1) && log.queue().is_urgent());
    // The thread was woken before.
    assert!(!append(EAGER_WRITE_BYTES));
}

#[test]
fn frames_queue_in_chunks_and_space_waiters_run_as_chunks_are_written() {
    let log = Log::new();
    // The thread does not run.
    let _ = log.open(Catalog::default(), Segment::at("/dev/null"), u64::MAX, false);
    let append = |bytes: usize| {
        log.append(|to| {
            to.resize(to.len() + bytes, 7);
            true
        });
    };
    let lengths = |chunks: &VecDeque<Vec<u8>>| chunks.iter().map(Vec::len).collect::<Vec<_>>();
    append(CHUNK_BYTES - 1);
    append(5);
    append(1);
    // Only the first append after a switch begins a new chunk.
    log.switch(Segment::at("/dev/null"), false).unwrap();
    append(2);
    append(3);
    let batch = log.queue().take();
    assert_eq!(lengths(&batch.chunks), [CHUNK_BYTES + 4, 1, 5]);
    assert_eq!(batch.next.unwrap().0, 2);
    assert_eq!(log.queue().in_flight, CHUNK_BYTES + 10);
    batch.chunks.into_iter().for_each(|chunk| log.recycle(chunk));
    let queue = log.queue();
    assert_eq!((queue.in_flight, queue.pending.bytes, queue.spare.len()), (0, 0, MAX_SPARE_CHUNKS));
    drop(queue);

    let (tell, durability_notice) = channel();
    let fill = MAX_QUEUED_BYTES.div_ceil(CHUNK_BYTES);
    for k in 0..fill {
        assert!(!log.is_full(), "{k}");
        append(CHUNK_BYTES);
    }
    log.when_room(Box::new(move || tell.send(()).unwrap()));
    let batch = log.queue().take();
    assert!(log.is_full(), "bytes in flight are not written");
    assert_eq!(lengths(&batch.chunks), vec![CHUNK_BYTES; fill]);
    let mut chunks = batch.chunks.into_iter();
    while log.is_full() {
        assert!(durability_notice.try_recv().is_err());
        log.recycle(chunks.next().unwrap());
    }
    durability_notice.try_recv().unwrap();
    assert!(chunks.len() > 0);
}

#[test]
fn a_full_disk_is_reported_and_a_snapshot_closes_the_gap() {
    let path = std::env::temp_dir().join(format!("fastps-log-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    let directory = Directory::open(&path).unwrap();
    let log = Log::new();
    let thread = std::thread::spawn(log.open(Catalog::default(), Segment::at("/dev/full"), u64::MAX, false));
    let first = durability_notice(&log);
    assert!(log.sync(log.position()).is_err());
    let error = log.check().unwrap_err();
    assert!(error.kind == Kind::Unavailable && error.message.contains("/dev/full"), "{error}");
    // A record that is not durable is not reported as durable, now or after the next sync.
    let second = durability_notice(&log);
    let origin = Origin { id: 1, shard: 0, shards: 1 };
    assert!(
        log.switch(Segment::create(&directory, 1, false, origin, Author::default()).unwrap(), false).is_err()
    );
    log.switch(Segment::create(&directory, 2, true, origin, Author::default()).unwrap(), true).unwrap();
    assert!(log.check().is_err());
    let third = durability_notice(&log);
    assert!(third.recv_timeout(Duration::from_millis(50)).is_err());
    log.close_gap();
    log.check().unwrap();
    assert!(
        log.take_failure().is_some_and(|why| why.message.contains("/dev/full")),
        "whoever asks late learns it"
    );
    assert_eq!(log.take_failure(), None);
    for durability_notice in [first, second, third, durability_notice(&log)] {
        durability_notice.recv_timeout(TIMEOUT).unwrap();
    }
    log.switch(Segment::create(&directory, 3, false, origin, Author::default()).unwrap(), false).unwrap();
    durability_notice(&log).recv_timeout(TIMEOUT).unwrap();
    log.close();
    thread.join().unwrap();
    let bytes = std::fs::read(directory.segment(2)).unwrap();
    assert!(bytes.windows(4).filter(|four| *four == frame::MARK).count() >= 4);
    std::fs::remove_dir_all(&path).unwrap();
}

#[test]
fn a_gap_is_open_until_the_thread_has_left_the_unusable_segment() {
    let path = std::env::temp_dir().join(format!("fastps-log-gap-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    let directory = Directory::open(&path).unwrap();
    let log = Log::new();
    let run = log.open(Catalog::default(), Segment::at("/dev/full"), u64::MAX, false);
    log.give_up(&Error::new(Kind::Unavailable, "the files are gone"));
    let origin = Origin { id: 1, shard: 0, shards: 1 };
    log.switch(Segment::create(&directory, 2, true, origin, Author::default()).unwrap(), true).unwrap();
    let closing = std::thread::spawn({
        let log = log.clone();
        move || log.close_gap()
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!closing.is_finished(), "the thread would end the unusable segment, which fails");
    let thread = std::thread::spawn(run);
    closing.join().unwrap();
    log.sync(log.position()).unwrap();
    log.check().unwrap();
    log.close();
    thread.join().unwrap();
    std::fs::remove_dir_all(&path).unwrap();
}

#[test]
fn nothing_is_written_behind_a_segment_that_could_not_be_ended() {
    let path = std::env::temp_dir().join(format!("fastps-log-end-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    let directory = Directory::open(&path).unwrap();
    let log = Log::new();
    let run = log.open(Catalog::default(), Segment::at("/dev/full"), u64::MAX, false);
    let _unheard = durability_notice(&log);
    let origin = Origin { id: 1, shard: 0, shards: 1 };
    log.switch(Segment::create(&directory, 2, false, origin, Author::default()).unwrap(), false).unwrap();
    let thread = std::thread::spawn(run);
    assert!(log.sync(log.position()).is_err());
    let is_begun = || !beginning(&directory.segment(2)).unwrap().unwrap().more;
    // The thread is idle for longer than it delays what it has to note.
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_begun());
    // Dropped, since the log is broken.
    let _unheard = durability_notice(&log);
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_begun());
    log.close();
    thread.join().unwrap();
    assert!(is_begun());
    std::fs::remove_dir_all(&path).unwrap();
}

#[test]
fn a_shard_of_little_memory_queues_less() {
    for (limit, most) in [(u64::MAX, MAX_QUEUED_BYTES), (128 << 20, 16 << 20), (0, 2 * EAGER_WRITE_BYTES)] {
        assert_eq!(Queue::most_for(limit), most, "{limit}");
    }
    let log = Log::new();
    let _ = log.open(Catalog::default(), Segment::at("/dev/null"), 128 << 20, false);
    log.append(|to| {
        to.resize(16 << 20, 1);
        true
    });
    assert!(log.is_full());
}
