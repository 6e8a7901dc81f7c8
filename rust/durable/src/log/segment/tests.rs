//! Appended frames are read back, after any mix of appends and any torn write.

use super::*;
use crate::frame::Content;
use crate::log::read::{SegmentEnd, read};
use fastps_core::frame::Identity;
use fastps_core::tensor::SliceId;
use std::ops::{ControlFlow, Range};
use std::path::Path;

const ORIGIN: Origin = Origin { id: 1, shard: 0, shards: 1 };

/// A directory that is removed on drop.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new(name: &str) -> (Self, Directory, PathBuf) {
        let folder = std::env::temp_dir().join(format!("fastps-segment-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let directory = Directory::open(&folder).unwrap();
        let path = directory.segment(1);
        (Self(folder), directory, path)
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes of a fence frame.
const FENCE: usize = frame::HEADER_BYTES + 25;

/// Frames of at least this many bytes.
fn frames(bytes: usize) -> Vec<u8> {
    let mut frames = Vec::new();
    while frames.len() < bytes {
        let sequence = frames.len() as u64;
        frame::fence(&mut frames, SliceId(7), Identity { client: 3, sequence });
    }
    frames
}

fn append(segment: &mut Segment, bytes: usize) {
    let mut frames = frames(bytes);
    segment.append(&mut frames).unwrap();
    segment.fill_ahead(frames.len());
    segment.sync().unwrap();
}

fn end(path: &Path) -> Result<SegmentEnd, String> {
    match read(path, 1, Some(ORIGIN), |_, _| Ok(ControlFlow::Continue(()))) {
        Ok((_, end)) => Ok(end),
        Err(why) => Err(format!("{why:?}")),
    }
}

#[test]
fn zeros_ahead_are_not_a_torn_frame() {
    let (_folder, directory, path) = TempFolder::new("zeros");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    let size = || std::fs::metadata(&path).unwrap().len();
    // The first short append or the second writes the first zeros, depending on `ZERO_FILL_INTERVAL_BYTES`.
    let (mut last, mut fillings) = (size(), 0);
    append(&mut segment, 1000);
    for _ in 0..ZEROS_AHEAD_BYTES / MAX_SHORT_APPEND_BYTES as u64 + 4 {
        append(&mut segment, MAX_SHORT_APPEND_BYTES - 100);
        let grown = size() - last;
        assert!(grown == 0 || grown >= ZEROS_AHEAD_BYTES, "{grown}");
        fillings += u32::from(grown > 0);
        last = size();
        assert!(last > segment.length);
        assert_eq!(end(&path), Ok(SegmentEnd::Open { whole: segment.length, torn: 0 }));
    }
    assert_eq!(fillings, 2);
    // A partly written frame does not count as zeros.
    let other = File::options().write(true).open(&path).unwrap();
    other.write_all_at(&frame::MARK, segment.length).unwrap();
    let torn = frame::MARK.len() as u64;
    assert_eq!(end(&path), Ok(SegmentEnd::Open { whole: segment.length, torn }));
    // After a kill, the next start continues at the same place.
    let whole = segment.length;
    let mut again = Segment::reopen(&directory, 1, whole).unwrap();
    assert_eq!(size(), whole);
    append(&mut again, 100 << 10);
    assert_eq!(end(&path), Ok(SegmentEnd::Open { whole: again.length, torn: 0 }));
    again.trim();
    assert_eq!(size(), again.length);
    // More zeros than are ever written ahead mean that a write is missing.
    other.set_len(again.length + ZEROS_AHEAD_BYTES + 1).unwrap();
    assert_eq!(end(&path), Ok(SegmentEnd::Open { whole: again.length, torn: ZEROS_AHEAD_BYTES + 1 }));
    append(&mut again, 100 << 10);
    let whole = again.length;
    again.end(&mut [], 2).unwrap();
    assert!(size() < whole + 100, "zeros stay behind the end");
}

#[test]
fn long_and_short_appends_mix_in_any_order() {
    let (_folder, directory, path) = TempFolder::new("mixed");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    let (mut written, size) = (0, || std::fs::metadata(&path).unwrap().len());
    for (k, bytes) in [
        1,
        MAX_SHORT_APPEND_BYTES + 1,
        1000,
        3 << 20,
        MAX_SHORT_APPEND_BYTES + 1,
        MAX_SHORT_APPEND_BYTES + 4095,
        1,
        1,
    ]
    .into_iter()
    .enumerate()
    {
        let mut frames = frames(bytes);
        written += bytes.div_ceil(FENCE);
        segment.append(&mut frames).unwrap();
        if k % 3 == 1 {
            segment.sync().unwrap();
        }
        let mut read_back = 0;
        let end = read(&path, 1, Some(ORIGIN), |_, content| {
            read_back += usize::from(!matches!(content, Content::Durable(_)));
            Ok(ControlFlow::Continue(()))
        });
        assert_eq!(end.unwrap().1, SegmentEnd::Open { whole: segment.length, torn: 0 });
        assert_eq!(read_back, written);
    }
    segment.trim();
    assert_eq!(size(), segment.length);
    segment.end(&mut frames(MAX_SHORT_APPEND_BYTES + 1), 2).unwrap();
    assert_eq!(end(&path), Ok(SegmentEnd::Continued(2)));
}

#[test]
fn a_failed_direct_write_falls_back_to_the_page_cache() {
    let (_folder, directory, path) = TempFolder::new("spoiled");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, MAX_SHORT_APPEND_BYTES + 1);
    if let Some(direct_file) = &mut segment.direct_file {
        direct_file.misalign();
    }
    for bytes in [2 * MAX_SHORT_APPEND_BYTES, 1, MAX_SHORT_APPEND_BYTES + 1] {
        append(&mut segment, bytes);
        assert_eq!(end(&path), Ok(SegmentEnd::Open { whole: segment.length, torn: 0 }));
    }
    segment.end(&mut frames(MAX_SHORT_APPEND_BYTES + 1), 2).unwrap();
    assert_eq!(end(&path), Ok(SegmentEnd::Continued(2)));
}

#[test]
fn files_are_the_same_without_direct_io() {
    let mut files = Vec::new();
    for place in [std::env::temp_dir(), "/dev/shm".into()].iter().filter(|place| place.is_dir()) {
        let folder = TempFolder(place.join(format!("fastps-segment-place-{}", std::process::id())));
        let directory = Directory::open(&folder.0).unwrap();
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        for bytes in [1, MAX_SHORT_APPEND_BYTES + 1, 1, 3 * MAX_SHORT_APPEND_BYTES] {
            append(&mut segment, bytes);
        }
        segment.end(&mut frames(MAX_SHORT_APPEND_BYTES + 1), 2).unwrap();
        files.push(std::fs::read(directory.segment(1)).unwrap());
    }
    assert!(files.iter().all(|file| *file == files[0]));
}

/// A power cut may leave any subset of the blocks of an unsynced append. The first block was written before,
/// and begins with durable bytes; a disk with 512-byte sectors may have written any of its sectors.
#[test]
fn durable_frames_survive_any_torn_write_after_them() {
    const BLOCK: usize = 4096;
    for ahead in [false, true] {
        let (_folder, directory, path) = TempFolder::new(&format!("torn-{ahead}"));
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        segment.append(&mut frames(MAX_SHORT_APPEND_BYTES + 1000)).unwrap();
        if ahead {
            append(&mut segment, 2000);
            append(&mut segment, MAX_SHORT_APPEND_BYTES - 100);
        }
        segment.sync().unwrap();
        let (durable, mut before) = (segment.length, std::fs::read(&path).unwrap());
        segment.append(&mut frames(MAX_SHORT_APPEND_BYTES + 1)).unwrap();
        let (whole, after) = (segment.length, std::fs::read(&path).unwrap());
        drop(segment);
        before.resize(after.len(), 0);
        let check = |bytes: &[u8], what: &str| {
            std::fs::write(&path, bytes).unwrap();
            let Ok(SegmentEnd::Open { whole: read, .. }) = end(&path) else {
                panic!("{what}: {:?}", end(&path))
            };
            assert!((durable..=whole).contains(&read), "{what}: {read}");
            read
        };
        // `range` from `these`, and the rest from `others`.
        let mix = |these: &[u8], others: &[u8], range: &Range<usize>| {
            let mut mixed = others.to_vec();
            mixed[range.clone()].copy_from_slice(&these[range.clone()]);
            mixed
        };
        let first = durable as usize / BLOCK * BLOCK;
        for at in (first..(whole as usize).next_multiple_of(BLOCK)).step_by(BLOCK) {
            check(&after[..at.max(durable as usize)], "the end is missing");
            check(&mix(&after, &before, &(at..at + BLOCK)), "one block was written");
            let read = check(&mix(&before, &after, &(at..at + BLOCK)), "one block is missing");
            // A start continues after the last whole frame.
            if at % (4 * BLOCK) == 0 {
                Segment::reopen(&directory, 1, read)
                    .unwrap()
                    .end(&mut frames(MAX_SHORT_APPEND_BYTES + 1), 2)
                    .unwrap();
                assert_eq!(end(&path), Ok(SegmentEnd::Continued(2)));
            }
        }
        for there in 0..1 << (BLOCK / 512) {
            let mut mixed = after[..first + 2 * BLOCK].to_vec();
            for part in (0..BLOCK / 512).filter(|part| there >> part & 1 == 0) {
                let at = first + part * 512;
                mixed = mix(&before, &mixed, &(at..at + 512));
            }
            check(&mixed, "a part of the first block was written");
        }
    }
}

/// A running server appends where the reader has seen zeros.
#[test]
fn frames_appended_during_a_read_are_not_damage() {
    let (_folder, directory, path) = TempFolder::new("live");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, 70 << 10);
    let whole = segment.length;
    let mut more = 3;
    let read = read(&path, 1, Some(ORIGIN), |_, _| {
        // The second append records the first sync.
        while more > 0 {
            more -= 1;
            append(&mut segment, 1000);
        }
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!(read.unwrap().1, SegmentEnd::Open { whole, torn: 0 });
}

/// No frame of an ended segment is dropped silently, wherever the damage is; the file ends mostly in zeros.
#[test]
fn an_end_frame_implies_that_all_before_it_was_durable() {
    let (_folder, directory, path) = TempFolder::new("end");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, 1);
    let before = segment.length;
    append(&mut segment, 1);
    let whole = segment.length;
    drop(segment);
    Segment::reopen(&directory, 1, whole).unwrap().end(&mut [], 2).unwrap();
    assert_eq!(end(&path), Ok(SegmentEnd::Continued(2)));
    let bytes = std::fs::read(&path).unwrap();
    for at in before as usize..whole as usize {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let end = end(&path);
        assert!(matches!(&end, Err(why) if why.contains("is damaged at byte")), "byte {at}: {end:?}");
    }
}
