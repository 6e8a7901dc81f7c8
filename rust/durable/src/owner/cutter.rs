//! Reads the log of a running server piece by piece, as it is to be copied. Takes no lock that a writer waits
//! for, and reads only what is synced.

use super::pieces::{Piece, cut};
use super::record::LogPosition;
use crate::files::directory::Directory;
use crate::files::io::failed;
use crate::files::removal::open_segment;
use crate::frame::{HEADER_BYTES, MAX_CONTENT_BYTES};
use fastps_core::error::Result;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The longest frame, which a piece holds even if it is longer than pieces are.
const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_CONTENT_BYTES;

/// The log of a shard's directory, from some place on.
#[derive(Debug)]
pub struct Cutter {
    directory: Directory,
    next: LogPosition,
    /// The segment of `next`. While it is open, a server that removes it does not shorten it.
    segment: Option<File>,
}

impl Cutter {
    /// Begins at a place in the log of this directory.
    pub fn new(directory: &Path, next: LogPosition) -> Self {
        Self { directory: Directory::unlocked(directory), next, segment: None }
    }

    /// Where the next piece begins.
    pub fn next(&self) -> LogPosition {
        self.next
    }

    /// Bytes that can be cut, if the log is synced up to `synced`. Those that end a segment count as very many:
    /// they need not wait for more.
    pub fn ready(&self, synced: LogPosition) -> u64 {
        if synced.segment > self.next.segment {
            return u64::MAX;
        }
        let is_here = synced.segment == self.next.segment;
        if is_here { synced.offset.saturating_sub(self.next.offset) } else { 0 }
    }

    /// The next piece of a log that is synced up to `synced`: whole frames, at most `most` bytes, except that a
    /// frame may be longer. `None`: there is none yet. After a gap, the next piece does not begin where this one
    /// ends.
    pub fn cut(&mut self, term: u64, synced: LogPosition, most: usize) -> Result<Option<(Piece, Vec<u8>)>> {
        while self.ready(synced) > 0 {
            let mut bytes = self.read(synced, most)?;
            let mut found = cut(&bytes, most);
            if found.bytes == 0 && bytes.len() == most {
                bytes = self.read(synced, MAX_FRAME_BYTES)?;
                found = cut(&bytes, most);
            }
            if found.bytes == 0 {
                if !self.skip(synced)? {
                    return Ok(None);
                }
                continue;
            }
            bytes.truncate(found.bytes);
            let begin = self.next;
            match found.next {
                Some(segment) => self.go_to(segment),
                None => self.next.offset += found.bytes as u64,
            }
            return Ok(Some((Piece { term, begin, end: self.next }, bytes)));
        }
        Ok(None)
    }

    fn go_to(&mut self, segment: u64) {
        (self.next, self.segment) = (LogPosition { segment, offset: 0 }, None);
    }

    /// Goes on with the next segment that is there: the rest of this one is not whole, or it was removed. Returns
    /// whether there is one.
    fn skip(&mut self, synced: LogPosition) -> Result<bool> {
        let later = self.directory.segments()?.into_iter().find(|number| *number > self.next.segment);
        let Some(later) = later.filter(|number| *number <= synced.segment) else { return Ok(false) };
        self.go_to(later);
        Ok(true)
    }

    /// Bytes from the next piece on that are synced, at most `most`. None if the segment was removed.
    fn read(&mut self, synced: LogPosition, most: usize) -> Result<Vec<u8>> {
        let LogPosition { segment, offset } = self.next;
        let path = self.directory.segment(segment);
        let file = match self.segment.take().map_or_else(|| open_segment(&path), Ok) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ResourceBusy) => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(failed("read", &path, &error)),
        };
        let read = || {
            let length = file.metadata()?.len();
            let end = if synced.segment > segment { length } else { synced.offset.min(length) };
            let mut bytes = vec![0; end.saturating_sub(offset).min(most as u64) as usize];
            file.read_exact_at(&mut bytes, offset)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error: std::io::Error| failed("read", &path, &error))?;
        self.segment = Some(file);
        Ok(bytes)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::frame;
    use std::path::PathBuf;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("fastps-cutter-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn write(&self, segment: u64, bytes: &[u8]) {
            std::fs::write(Directory::unlocked(&self.0).segment(segment), bytes).unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn at(segment: u64, offset: u64) -> LogPosition {
        LogPosition { segment, offset }
    }

    /// Frames, and the end of the segment.
    fn frames(count: u64, next: Option<u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        (0..count).for_each(|offset| frame::durable(&mut bytes, offset));
        if let Some(next) = next {
            frame::end(&mut bytes, next);
        }
        frame::seal(&mut bytes);
        bytes
    }

    #[test]
    fn pieces_are_whole_frames_of_what_is_synced_and_follow_each_other() {
        let folder = Folder::new("follow");
        let (first, second) = (frames(10, Some(3)), frames(4, None));
        folder.write(2, &first);
        folder.write(3, &[&second[..], &[0; 100]].concat());
        let size = second.len() as u64 / 4;
        for most in [1, size as usize, 3 * size as usize, 1 << 20] {
            let mut cutter = Cutter::new(&folder.0, at(2, 0));
            assert_eq!(cutter.cut(1, at(2, 0), most).unwrap(), None, "nothing is synced");
            let (mut got, mut places) = (Vec::new(), vec![at(2, 0)]);
            for synced in [at(2, size), at(2, 5 * size + 1), at(3, size), at(3, 4 * size)] {
                while let Some((piece, bytes)) = cutter.cut(1, synced, most).unwrap() {
                    assert_eq!(piece.begin, *places.last().unwrap());
                    assert!(piece.end <= synced && (bytes.len() <= most || bytes.len() as u64 <= size));
                    places.push(piece.end);
                    got.extend(bytes);
                }
            }
            assert!(got == [&first[..], &second[..]].concat() && cutter.next() == at(3, 4 * size), "{most}");
        }
    }

    #[test]
    fn a_broken_or_removed_segment_leaves_a_gap() {
        let folder = Folder::new("gap");
        let whole = frames(2, None);
        let torn = [&whole[..], &whole[..7]].concat();
        folder.write(2, &torn);
        folder.write(5, &whole);
        for begin in [at(2, whole.len() as u64), at(1, 0), at(3, 0)] {
            let mut cutter = Cutter::new(&folder.0, begin);
            let pieces =
                || cutter.cut(1, at(5, whole.len() as u64), 1 << 20).unwrap().map(|(piece, _)| piece);
            let begins: Vec<_> = std::iter::from_fn(pieces).map(|piece| piece.begin).collect();
            let expected = if begin == at(1, 0) { vec![at(2, 0), at(5, 0)] } else { vec![at(5, 0)] };
            assert_eq!(begins, expected, "{begin:?}");
        }
        // A segment that may still be written to is not left.
        let mut cutter = Cutter::new(&folder.0, at(2, 0));
        let synced = at(2, torn.len() as u64);
        assert_eq!(cutter.cut(1, synced, 1 << 20).unwrap().unwrap().0.end, at(2, whole.len() as u64));
        assert_eq!(cutter.cut(1, synced, 1 << 20).unwrap(), None);
        assert_eq!(cutter.next(), at(2, whole.len() as u64));
    }

    #[test]
    fn a_frame_longer_than_a_piece_is_a_piece() {
        let folder = Folder::new("long");
        let mut bytes = frames(1, None);
        let short = bytes.len();
        frame::event(&mut bytes, &crate::catalog::Event::Named(1, "n".repeat(5000).into()));
        frame::seal(&mut bytes[short..]);
        folder.write(1, &bytes);
        let mut cutter = Cutter::new(&folder.0, at(1, 0));
        let synced = at(1, bytes.len() as u64);
        assert_eq!(cutter.cut(1, synced, 1000).unwrap().unwrap().1, &bytes[..short]);
        assert_eq!(cutter.cut(1, synced, 1000).unwrap().unwrap().1, &bytes[short..]);
    }
}
