//! What is appended to a segment is read back.

use super::*;
use crate::frame::Content;
use crate::log::read::{End, read};
use fastps_core::frame::Identity;
use fastps_core::tensor::SliceId;
use std::ops::Range;
use std::path::Path;

const ORIGIN: Origin = Origin { id: 1, shard: 0, shards: 1 };

/// A directory that is removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> (Self, Directory, PathBuf) {
        let folder = std::env::temp_dir().join(format!("fastps-segment-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let directory = Directory::open(&folder).unwrap();
        let path = directory.segment(1);
        (Self(folder), directory, path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes of a frame that tells of a fence.
const FENCE: usize = frame::HEADER + 25;

/// Frames of so many bytes or a few more.
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

fn end(path: &Path) -> Result<End, String> {
    match read(path, 1, Some(ORIGIN), |_, _| Ok(())) {
        Ok((_, end)) => Ok(end),
        Err(why) => Err(format!("{why:?}")),
    }
}

#[test]
fn zeros_ahead_are_no_torn_frame() {
    let (_folder, directory, path) = Folder::new("zeros");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    let size = || std::fs::metadata(&path).unwrap().len();
    // The first zeros come with the first short append or with the second: as in `BETWEEN`.
    let (mut last, mut fillings) = (size(), 0);
    append(&mut segment, 1000);
    for _ in 0..AHEAD / SHORT as u64 + 4 {
        append(&mut segment, SHORT - 100);
        let grown = size() - last;
        assert!(grown == 0 || grown >= AHEAD, "{grown}");
        fillings += u32::from(grown > 0);
        last = size();
        assert!(last > segment.length);
        assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn: 0 }));
    }
    assert_eq!(fillings, 2);
    // A frame of which only a part was written is no zeros.
    let other = File::options().write(true).open(&path).unwrap();
    other.write_all_at(&frame::MARK, segment.length).unwrap();
    let torn = frame::MARK.len() as u64;
    assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn }));
    // The next start goes on where it ended, as if it had not been killed.
    let whole = segment.length;
    let mut again = Segment::reopen(&directory, 1, whole).unwrap();
    assert_eq!(size(), whole);
    append(&mut again, 100 << 10);
    assert_eq!(end(&path), Ok(End::Open { whole: again.length, torn: 0 }));
    again.trim();
    assert_eq!(size(), again.length);
    // More zeros than are ever written ahead: something was not written.
    other.set_len(again.length + AHEAD + 1).unwrap();
    assert_eq!(end(&path), Ok(End::Open { whole: again.length, torn: AHEAD + 1 }));
    append(&mut again, 100 << 10);
    let whole = again.length;
    again.end(&mut [], 2).unwrap();
    assert!(size() < whole + 100, "zeros stay behind the end");
}

#[test]
fn long_and_short_appends_follow_each_other_in_any_order() {
    let (_folder, directory, path) = Folder::new("mixed");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    let (mut written, size) = (0, || std::fs::metadata(&path).unwrap().len());
    for (k, bytes) in [1, SHORT + 1, 1000, 3 << 20, SHORT + 1, SHORT + 4095, 1, 1].into_iter().enumerate() {
        let mut frames = frames(bytes);
        written += bytes.div_ceil(FENCE);
        segment.append(&mut frames).unwrap();
        if k % 3 == 1 {
            segment.sync().unwrap();
        }
        let mut read_back = 0;
        let end = read(&path, 1, Some(ORIGIN), |_, content| {
            read_back += usize::from(!matches!(content, Content::Durable(_)));
            Ok(())
        });
        assert_eq!(end.unwrap().1, End::Open { whole: segment.length, torn: 0 });
        assert_eq!(read_back, written);
    }
    segment.trim();
    assert_eq!(size(), segment.length);
    segment.end(&mut frames(SHORT + 1), 2).unwrap();
    assert_eq!(end(&path), Ok(End::Continued(2)));
}

#[test]
fn a_file_that_takes_no_blocks_after_all_is_written_as_any_other() {
    let (_folder, directory, path) = Folder::new("spoiled");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, SHORT + 1);
    if let Some(blocks) = &mut segment.blocks {
        blocks.spoil();
    }
    for bytes in [2 * SHORT, 1, SHORT + 1] {
        append(&mut segment, bytes);
        assert_eq!(end(&path), Ok(End::Open { whole: segment.length, torn: 0 }));
    }
    segment.end(&mut frames(SHORT + 1), 2).unwrap();
    assert_eq!(end(&path), Ok(End::Continued(2)));
}

#[test]
fn a_file_system_without_such_blocks_gets_the_same_file() {
    let mut files = Vec::new();
    for place in [std::env::temp_dir(), "/dev/shm".into()].iter().filter(|place| place.is_dir()) {
        let folder = Folder(place.join(format!("fastps-segment-place-{}", std::process::id())));
        let directory = Directory::open(&folder.0).unwrap();
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        for bytes in [1, SHORT + 1, 1, 3 * SHORT] {
            append(&mut segment, bytes);
        }
        segment.end(&mut frames(SHORT + 1), 2).unwrap();
        files.push(std::fs::read(directory.segment(1)).unwrap());
    }
    assert!(files.iter().all(|file| *file == files[0]));
}

/// A power cut leaves any of the blocks of an append that was not synced. The first was written before, and begins with
/// what is durable; of this one a disk that writes 512 bytes at a time may write any.
#[test]
fn what_was_durable_is_whole_whatever_is_there_of_the_blocks_behind_it() {
    const BLOCK: usize = 4096;
    for ahead in [false, true] {
        let (_folder, directory, path) = Folder::new(&format!("torn-{ahead}"));
        let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
        segment.append(&mut frames(SHORT + 1000)).unwrap();
        if ahead {
            append(&mut segment, 2000);
            append(&mut segment, SHORT - 100);
        }
        segment.sync().unwrap();
        let (durable, mut before) = (segment.length, std::fs::read(&path).unwrap());
        segment.append(&mut frames(SHORT + 1)).unwrap();
        let (whole, after) = (segment.length, std::fs::read(&path).unwrap());
        drop(segment);
        before.resize(after.len(), 0);
        let check = |bytes: &[u8], what: &str| {
            std::fs::write(&path, bytes).unwrap();
            let Ok(End::Open { whole: read, .. }) = end(&path) else { panic!("{what}: {:?}", end(&path)) };
            assert!((durable..=whole).contains(&read), "{what}: {read}");
            read
        };
        // These bytes of one, and all others of the other.
        let mix = |these: &[u8], others: &[u8], range: &Range<usize>| {
            let mut mixed = others.to_vec();
            mixed[range.clone()].copy_from_slice(&these[range.clone()]);
            mixed
        };
        let first = durable as usize / BLOCK * BLOCK;
        for at in (first..(whole as usize).next_multiple_of(BLOCK)).step_by(BLOCK) {
            check(&after[..at.max(durable as usize)], "the end is not there");
            check(&mix(&after, &before, &(at..at + BLOCK)), "one block is there");
            let read = check(&mix(&before, &after, &(at..at + BLOCK)), "one block is not there");
            // A start goes on where whole frames end.
            if at % (4 * BLOCK) == 0 {
                Segment::reopen(&directory, 1, read).unwrap().end(&mut frames(SHORT + 1), 2).unwrap();
                assert_eq!(end(&path), Ok(End::Continued(2)));
            }
        }
        for there in 0..1 << (BLOCK / 512) {
            let mut mixed = after[..first + 2 * BLOCK].to_vec();
            for part in (0..BLOCK / 512).filter(|part| there >> part & 1 == 0) {
                let at = first + part * 512;
                mixed = mix(&before, &mixed, &(at..at + 512));
            }
            check(&mixed, "a part of the first block is there");
        }
    }
}

/// A server that works appends what was read as zeros.
#[test]
fn frames_that_come_while_a_log_is_read_are_no_damage() {
    let (_folder, directory, path) = Folder::new("live");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, 70 << 10);
    let whole = segment.length;
    let mut more = 3;
    let read = read(&path, 1, Some(ORIGIN), |_, _| {
        // The first sync is told with the second append.
        while more > 0 {
            more -= 1;
            append(&mut segment, 1000);
        }
        Ok(())
    });
    assert_eq!(read.unwrap().1, End::Open { whole, torn: 0 });
}

/// Of a log that was ended nothing is left out silently, wherever it is damaged; its end is zeros for the most part.
#[test]
fn an_end_says_that_all_before_it_was_durable() {
    let (_folder, directory, path) = Folder::new("end");
    let mut segment = Segment::create(&directory, 1, false, ORIGIN, Author::default()).unwrap();
    append(&mut segment, 1);
    let before = segment.length;
    append(&mut segment, 1);
    let whole = segment.length;
    drop(segment);
    Segment::reopen(&directory, 1, whole).unwrap().end(&mut [], 2).unwrap();
    assert_eq!(end(&path), Ok(End::Continued(2)));
    let bytes = std::fs::read(&path).unwrap();
    for at in before as usize..whole as usize {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        std::fs::write(&path, &damaged).unwrap();
        let end = end(&path);
        assert!(matches!(&end, Err(why) if why.contains("is damaged at byte")), "byte {at}: {end:?}");
    }
}
