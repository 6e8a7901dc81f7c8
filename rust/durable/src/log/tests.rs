//! The queue and its thread.

use super::*;
use crate::files::directory::Directory;
use crate::frame::{Author, Origin};
use crate::log::queue::{ENOUGH, FULL, MUCH, PIECE, SPARE};
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PATIENT: Duration = Duration::from_secs(30);

fn told(log: &Log) -> Receiver<()> {
    let (tell, told) = channel();
    log.append(|to| {
        frame::durable(to, 0);
        true
    });
    let then = move || {
        let _ = tell.send(());
    };
    log.when_durable(log.position(), Box::new(then));
    told
}

#[test]
fn what_nobody_waits_for_is_written_when_those_who_log_rest_or_when_there_is_much() {
    let log = Log::new();
    // Nobody runs the thread.
    let _ = log.open(Catalog::default(), Segment::at("/dev/null"));
    let append = |bytes: usize| {
        log.queue().append(|to| {
            to.resize(to.len() + bytes, 0);
            true
        })
    };
    assert!(!append(ENOUGH - 1));
    log.rest();
    assert!(!log.queue().is_urgent());
    assert!(!append(1) && !log.queue().is_urgent());
    log.rest();
    assert!(log.queue().is_urgent());
    // The moment is over.
    assert!(!append(MUCH - ENOUGH - 1) && !log.queue().is_urgent());
    assert!(append(1) && log.queue().is_urgent());
    // It was woken already.
    assert!(!append(MUCH));
}

#[test]
fn frames_wait_in_pieces_and_who_waits_for_room_gets_it_as_these_are_written() {
    let log = Log::new();
    // Nobody runs the thread.
    let _ = log.open(Catalog::default(), Segment::at("/dev/null"));
    let append = |bytes: usize| {
        log.append(|to| {
            to.resize(to.len() + bytes, 7);
            true
        });
    };
    let lengths = |pieces: &VecDeque<Vec<u8>>| pieces.iter().map(Vec::len).collect::<Vec<_>>();
    append(PIECE - 1);
    append(5);
    append(1);
    // Behind a switch others begin, once.
    log.switch(Segment::at("/dev/null"), false).unwrap();
    append(2);
    append(3);
    let group = log.queue().take();
    assert_eq!(lengths(&group.pieces), [PIECE + 4, 1, 5]);
    assert_eq!(group.next.unwrap().0, 2);
    assert_eq!(log.queue().taken, PIECE + 10);
    group.pieces.into_iter().for_each(|piece| log.written(piece));
    let queue = log.queue();
    assert_eq!((queue.taken, queue.waiting.bytes, queue.spare.len()), (0, 0, SPARE));
    drop(queue);

    let (tell, told) = channel();
    let fill = FULL.div_ceil(PIECE);
    for k in 0..fill {
        assert!(!log.is_full(), "{k}");
        append(PIECE);
    }
    log.when_room(Box::new(move || tell.send(()).unwrap()));
    let group = log.queue().take();
    assert!(log.is_full(), "what is taken is not written");
    assert_eq!(lengths(&group.pieces), vec![PIECE; fill]);
    let mut pieces = group.pieces.into_iter();
    while log.is_full() {
        assert!(told.try_recv().is_err());
        log.written(pieces.next().unwrap());
    }
    told.try_recv().unwrap();
    assert!(pieces.len() > 0);
}

#[test]
fn a_full_disk_is_told_and_a_snapshot_makes_up_for_it() {
    let path = std::env::temp_dir().join(format!("fastps-log-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    let directory = Directory::open(&path).unwrap();
    let log = Log::new();
    let thread = std::thread::spawn(log.open(Catalog::default(), Segment::at("/dev/full")));
    let first = told(&log);
    assert!(log.sync(log.position()).is_err());
    let error = log.check().unwrap_err();
    assert!(error.kind == Kind::Unavailable && error.message.contains("/dev/full"), "{error}");
    // What is not durable is not said to be, now or by the next that is.
    let second = told(&log);
    let origin = Origin { id: 1, shard: 0, shards: 1 };
    assert!(
        log.switch(Segment::create(&directory, 1, false, origin, Author::default()).unwrap(), false).is_err()
    );
    log.switch(Segment::create(&directory, 2, true, origin, Author::default()).unwrap(), true).unwrap();
    assert!(log.check().is_err());
    let third = told(&log);
    assert!(third.recv_timeout(Duration::from_millis(50)).is_err());
    log.heal();
    log.check().unwrap();
    for told in [first, second, third, told(&log)] {
        told.recv_timeout(PATIENT).unwrap();
    }
    log.switch(Segment::create(&directory, 3, false, origin, Author::default()).unwrap(), false).unwrap();
    told(&log).recv_timeout(PATIENT).unwrap();
    log.close();
    thread.join().unwrap();
    let bytes = std::fs::read(directory.segment(2)).unwrap();
    assert!(bytes.windows(4).filter(|four| *four == frame::MARK).count() >= 4);
    std::fs::remove_dir_all(&path).unwrap();
}
