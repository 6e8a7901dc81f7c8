//! Reads a log segment on a second thread, which also verifies checksums, while the caller processes earlier
//! frames.

use crate::files::damage::Unusable;
use crate::files::io::failed;
use crate::files::removal::open_segment;
use crate::frame::{self, HEADER_BYTES, Header};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

/// Bytes per batch.
const BATCH_BYTES: usize = 4 << 20;
/// Number of batches: one is processed while the other is read.
const BATCH_COUNT: usize = 2;

/// Calls `each` with consecutive whole frames, until it breaks or a frame is damaged or missing.
pub(crate) fn read(
    path: &Path,
    mut each: impl FnMut(&[u8]) -> std::result::Result<ControlFlow<()>, Unusable>,
) -> std::result::Result<(), Unusable> {
    let fail = |error: Error| Unusable::Failed(failed("read", path, &error));
    let file = match open_segment(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Unusable::Damaged(format!("{} is missing", path.display())));
        }
        opened => opened.map_err(fail)?,
    };
    let left = file.metadata().map_err(fail)?.len();
    let reader = ReadAhead { file, left, begun: Vec::new() };
    let (recycle, recycled) = channel();
    let (send, batches) = sync_channel(BATCH_COUNT);
    for _ in 0..BATCH_COUNT {
        let _ = recycle.send(Vec::new());
    }
    thread::scope(|scope| {
        let name = "fastps-read".to_owned();
        thread::Builder::new()
            .name(name)
            .spawn_scoped(scope, move || reader.run(&recycled, &send))
            .map_err(|error| fail(Error::new(ErrorKind::OutOfMemory, error)))?;
        // Dropped before the scope joins the thread, which ends the thread.
        let (recycle, batches) = (recycle, batches);
        for batch in &batches {
            let batch = batch.map_err(fail)?;
            if batch.is_empty() || each(&batch)?.is_break() {
                break;
            }
            let _ = recycle.send(batch);
        }
        Ok(())
    })
}

/// State of the reading thread.
struct ReadAhead {
    file: File,
    /// Bytes not yet read.
    left: u64,
    /// The start of a frame that continues in the next batch.
    begun: Vec<u8>,
}

impl ReadAhead {
    fn run(mut self, recycled: &Receiver<Vec<u8>>, send: &SyncSender<Result<Vec<u8>>>) {
        for batch in recycled {
            let read = self.next(batch);
            // An empty batch or an error is the last.
            let more = read.as_ref().is_ok_and(|batch| !batch.is_empty());
            if send.send(read).is_err() || !more {
                return;
            }
        }
    }

    /// Reads the next whole frames into `batch`. Empty: no whole frame follows.
    fn next(&mut self, mut batch: Vec<u8>) -> Result<Vec<u8>> {
        batch.clear();
        batch.append(&mut self.begun);
        let mut size = BATCH_BYTES;
        loop {
            self.fill(&mut batch, size)?;
            let whole = frame::whole(&batch);
            // A frame longer than a batch allocates only as much as the file can hold.
            let longer = batch
                .first_chunk::<HEADER_BYTES>()
                .and_then(Header::read)
                .map(|header| HEADER_BYTES + header.length);
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
        // The file became shorter: a server truncated the zeros after the last frame.
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

    /// The frames read from a file with these bytes, up to `enough` frames.
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
    fn frames_of_all_lengths_arrive_whole_and_in_order() {
        let mut lengths =
            vec![0, 1, BATCH_BYTES - HEADER_BYTES, BATCH_BYTES, BATCH_BYTES + 1, 3 * BATCH_BYTES + 5, 17];
        lengths.extend([1 << 20; 9]);
        lengths.extend((0..2000).map(|k| k * 3));
        let bytes = frames(&lengths);
        assert!(read_back("whole", &bytes, usize::MAX) == bytes);
        let some = read_back("enough", &bytes, 5);
        assert!(bytes.starts_with(&some) && some.len() < bytes.len());
    }

    #[test]
    fn reading_stops_at_a_damaged_or_torn_frame() {
        let whole = frames(&[100, 2 * BATCH_BYTES, 50]);
        let first = HEADER_BYTES + 100;
        for (name, at) in
            [("content", first + HEADER_BYTES + BATCH_BYTES), ("mark", first), ("sum", first + 8)]
        {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            assert!(read_back(name, &damaged, usize::MAX) == whole[..first], "{name}");
        }
        // Lengths beyond the end of the file.
        for (name, length) in [("short", 2 * BATCH_BYTES as u32 + 1000), ("long", u32::MAX)] {
            let mut damaged = whole.clone();
            damaged[first + 4..first + 8].copy_from_slice(&length.to_le_bytes());
            assert!(read_back(name, &damaged, usize::MAX) == whole[..first], "{name}");
        }
        for torn in [1, 50, 50 + HEADER_BYTES, 50 + HEADER_BYTES + 1] {
            let rest = read_back("torn", &whole[..whole.len() - torn], usize::MAX);
            assert!(whole.starts_with(&rest) && rest.len() >= first && rest.len() < whole.len());
        }
        assert!(read_back("empty", &[], usize::MAX).is_empty());
    }
}
