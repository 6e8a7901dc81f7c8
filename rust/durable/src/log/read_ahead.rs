//! Reading a segment of the log: a thread reads the next ones and compares their checksums, while those before are used.

use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::files::removal::open_segment;
use crate::frame::{self, HEADER, Header};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

/// What is read at a time.
const BATCH: usize = 4 << 20;
/// How many of them there are: one is used, and one is read.
const BATCHES: usize = 2;

/// Calls `each` with whole frames that lie one after the other, until it has enough, or at the first that is not as it was
/// written.
pub(crate) fn read(
    path: &Path,
    mut each: impl FnMut(&[u8]) -> std::result::Result<ControlFlow<()>, Unusable>,
) -> std::result::Result<(), Unusable> {
    let fail = |error: Error| Unusable::Failed(failed("read", path, &error));
    let file = open_segment(path).map_err(fail)?;
    let left = file.metadata().map_err(fail)?.len();
    let reader = Reader { file, left, begun: Vec::new() };
    let (spend, spent) = channel();
    let (send, batches) = sync_channel(BATCHES);
    for _ in 0..BATCHES {
        let _ = spend.send(Vec::new());
    }
    thread::scope(|scope| {
        let name = "fastps-read".to_owned();
        thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, move || reader.run(&spent, &send))
            .map_err(|error| fail(Error::new(ErrorKind::OutOfMemory, error)))?;
        // Dropped before the thread is waited for, which then ends.
        let (spend, batches) = (spend, batches);
        for batch in &batches {
            let batch = batch.map_err(fail)?;
            if batch.is_empty() || each(&batch)?.is_break() {
                break;
            }
            let _ = spend.send(batch);
        }
        Ok(())
    })
}

/// What the thread has.
struct Reader {
    file: File,
    /// Bytes that were not read yet.
    left: u64,
    /// The beginning of a frame.
    begun: Vec<u8>,
}

impl Reader {
    fn run(mut self, spent: &Receiver<Vec<u8>>, send: &SyncSender<Result<Vec<u8>>>) {
        for batch in spent {
            let read = self.next(batch);
            // None, or a failure, is the last.
            let more = read.as_ref().is_ok_and(|batch| !batch.is_empty());
            if send.send(read).is_err() || !more {
                return;
            }
        }
    }

    /// The next whole frames, in memory that there is already; none where no frame is whole.
    fn next(&mut self, mut batch: Vec<u8>) -> Result<Vec<u8>> {
        batch.clear();
        batch.append(&mut self.begun);
        let mut size = BATCH;
        loop {
            self.fill(&mut batch, size)?;
            let whole = frame::whole(&batch);
            // One that is longer than a batch takes memory only for what the file has.
            let longer =
                batch.first_chunk::<HEADER>().and_then(Header::read).map(|header| HEADER + header.length);
            match longer {
                Some(longer) if whole == 0 && longer > batch.len() && self.left > 0 => size = longer,
                _ => {
                    self.begun.extend_from_slice(&batch[whole..]);
                    batch.truncate(whole);
                    return Ok(batch);
                }
            }
        }
    }

    fn fill(&mut self, batch: &mut Vec<u8>, size: usize) -> Result<()> {
        let more = self.left.min(size.saturating_sub(batch.len()) as u64);
        batch.reserve_exact(more as usize);
        let read = (&mut self.file).take(more).read_to_end(batch)?;
        // A server cuts off the zeros behind a segment's last frame.
        self.left = if (read as u64) < more { 0 } else { self.left - more };
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Frames with contents of these lengths.
    fn frames(lengths: &[usize]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (k, length) in lengths.iter().enumerate() {
            bytes.extend_from_slice(&frame::MARK);
            bytes.extend_from_slice(&(*length as u32).to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend((0..*length).map(|at| (at * 7 + k) as u8));
        }
        frame::seal(&mut bytes);
        bytes
    }

    /// What is read of a file with these bytes, until so many frames were seen.
    fn read_back(name: &str, bytes: &[u8], enough: usize) -> Vec<u8> {
        let path = std::env::temp_dir().join(format!("fastps-read-ahead-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let (mut read, mut seen) = (Vec::new(), 0);
        let done = super::read(&path, |batch| {
            let mut rest = batch;
            while let Some((_, behind)) = frame::split(rest) {
                (rest, seen) = (behind, seen + 1);
            }
            assert!(rest.is_empty() && !batch.is_empty());
            read.extend_from_slice(batch);
            Ok(if seen < enough { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        });
        std::fs::remove_file(&path).unwrap();
        done.unwrap();
        read
    }

    #[test]
    fn frames_of_all_lengths_come_whole_and_in_their_order() {
        let mut lengths = vec![0, 1, BATCH - HEADER, BATCH, BATCH + 1, 3 * BATCH + 5, 17];
        lengths.extend([1 << 20; 9]);
        lengths.extend((0..2000).map(|k| k * 3));
        let bytes = frames(&lengths);
        assert!(read_back("whole", &bytes, usize::MAX) == bytes);
        let some = read_back("enough", &bytes, 5);
        assert!(bytes.starts_with(&some) && some.len() < bytes.len());
    }

    #[test]
    fn nothing_comes_behind_a_frame_that_is_damaged_or_torn() {
        let whole = frames(&[100, 2 * BATCH, 50]);
        let first = HEADER + 100;
        for (name, at) in [("content", first + HEADER + BATCH), ("mark", first), ("sum", first + 8)] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(read_back(name, &damaged, usize::MAX) == whole[..first], "{name}");
        }
        // Lengths that the file does not have.
        for (name, length) in [("short", 2 * BATCH as u32 + 1000), ("long", u32::MAX)] {
            let mut damaged = whole.clone();
            damaged[first + 4..first + 8].copy_from_slice(&length.to_le_bytes());
            assert!(read_back(name, &damaged, usize::MAX) == whole[..first], "{name}");
        }
        for torn in [1, 50, 50 + HEADER, 50 + HEADER + 1] {
            let rest = read_back("torn", &whole[..whole.len() - torn], usize::MAX);
            assert!(whole.starts_with(&rest) && rest.len() >= first && rest.len() < whole.len());
        }
        assert!(read_back("empty", &[], usize::MAX).is_empty());
    }
}
