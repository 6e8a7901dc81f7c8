//! Pieces of the log in a bucket: their names, where they are cut, which of them are the history of a shard,
//! and which are no longer needed. A piece never changes once it is written.

use crate::frame::{self, Content};
use crate::owner::record::{LogPosition, Record, Tip};
use fastps_core::error::{Error, Kind, Result};
use std::collections::BTreeMap;

/// A part of the log that one term has copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// The term of the server that wrote it.
    pub term: u64,
    /// Where it begins.
    pub begin: LogPosition,
    /// Where the next one of the same term begins. If that is another segment, the piece ends its own.
    pub end: LogPosition,
}

impl Piece {
    /// Its name in the folder of the shard's pieces. Names sort as the pieces do.
    pub fn name(&self) -> String {
        let Self { term, begin, end } = self;
        let place = |at: &LogPosition| format!("{:016x}.{:016x}", at.segment, at.offset);
        format!("{term:016x}-{}-{}", place(begin), place(end))
    }

    /// The piece of a name; `None`: it is no piece's.
    pub fn parse(name: &str) -> Option<Self> {
        let number = |digits: &str| {
            let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            (digits.len() == 16 && is_hex).then(|| u64::from_str_radix(digits, 16).ok()).flatten()
        };
        let place = |text: &str| {
            let (segment, offset) = text.split_once('.')?;
            Some(LogPosition { segment: number(segment)?, offset: number(offset)? })
        };
        let mut parts = name.split('-');
        let (term, begin, end) = (parts.next()?, parts.next()?, parts.next()?);
        let piece = Self { term: number(term)?, begin: place(begin)?, end: place(end)? };
        (parts.next().is_none() && piece.begin < piece.end).then_some(piece)
    }
}

/// Where a piece may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes of the whole frames.
    pub bytes: usize,
    /// The segment that continues the log, if the last of the frames says so.
    pub next: Option<u64>,
}

/// Cuts bytes of a segment, which begin with a frame, at the end of a whole one: at most at `most` bytes, except
/// that the first frame may be longer. Ends after the frame that ends the segment.
pub fn cut(bytes: &[u8], most: usize) -> Cut {
    let mut rest = bytes;
    while let Some((content, behind)) = frame::split(rest) {
        let end = bytes.len() - behind.len();
        if end > most && rest.len() < bytes.len() {
            break;
        }
        rest = behind;
        if let Some(Content::End(next)) = frame::read(content) {
            return Cut { bytes: end, next: Some(next) };
        }
    }
    Cut { bytes: bytes.len() - rest.len(), next: None }
}

/// How far a term's log is copied, while several pieces are on their way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Progress {
    copied: LogPosition,
    /// The pieces in the bucket that do not follow `copied` yet, by their begins.
    ahead: BTreeMap<LogPosition, LogPosition>,
}

impl Progress {
    /// All before this place is in the bucket.
    pub fn new(copied: LogPosition) -> Self {
        Self { copied, ahead: BTreeMap::new() }
    }

    /// The place before which everything is in the bucket, as pieces without gaps or in a snapshot.
    pub fn copied(&self) -> LogPosition {
        self.copied
    }

    /// The bucket has a piece.
    pub fn add(&mut self, piece: Piece) {
        self.ahead.insert(piece.begin, piece.end);
        self.follow();
    }

    /// The bucket has a snapshot, named by `latest`, from which the log is replayed from `at` on.
    pub fn add_snapshot(&mut self, at: LogPosition) {
        self.copied = self.copied.max(at);
        self.follow();
    }

    fn follow(&mut self) {
        while let Some(first) = self.ahead.first_entry().filter(|first| *first.key() <= self.copied) {
            let (begin, end) = first.remove_entry();
            // A piece that begins before a snapshot is in it, and so is its end: snapshots begin segments.
            if begin == self.copied {
                self.copied = end;
            }
        }
    }
}

/// The log after a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// The pieces to replay, in order.
    pub pieces: Vec<Piece>,
    /// Where they end. What the terms of the record wrote after it does not exist.
    pub end: LogPosition,
}

/// Finds the pieces that follow a snapshot whose log is replayed from `from` on. Pieces of a term behind the end
/// of its history do not exist, also if no later term has written one. A piece that is missing before a place
/// that the record names is damage.
pub fn history(pieces: &[Piece], record: &Record, from: LogPosition) -> Result<History> {
    let mut sorted: Vec<_> = pieces.to_vec();
    sorted.sort_unstable();
    let ends = sorted.iter().map(|piece| ((piece.term, piece.begin), piece.end)).collect();
    let mut history = History { pieces: Vec::new(), end: from };
    for base in &record.bases {
        // Otherwise the snapshot is a later term's.
        if history.end <= base.end {
            history.follow(&ends, base.term, Some(base.end));
            history.reaches(record, base.term, base.end)?;
            history.end = base.begin;
        }
    }
    let Tip { term, copied, .. } = record.tip;
    history.follow(&ends, term, None);
    history.reaches(record, term, copied)?;
    Ok(history)
}

impl History {
    /// Adds a term's pieces, as far as they follow each other.
    fn follow(
        &mut self,
        ends: &BTreeMap<(u64, LogPosition), LogPosition>,
        term: u64,
        most: Option<LogPosition>,
    ) {
        while let Some(end) = ends.get(&(term, self.end)).filter(|end| most.is_none_or(|most| **end <= most))
        {
            self.pieces.push(Piece { term, begin: self.end, end: *end });
            self.end = *end;
        }
    }

    fn reaches(&self, record: &Record, term: u64, place: LogPosition) -> Result<()> {
        if self.end >= place {
            return Ok(());
        }
        let say = |at: LogPosition| format!("segment {}, byte {}", at.segment, at.offset);
        let message = format!("the log in the bucket is damaged: a piece of term {term} is missing");
        Err(Error::new(Kind::Internal, message)
            .shard(record.shard)
            .expected(format!("pieces up to {}", say(place)), say(self.end)))
    }
}

/// Returns whether nobody will read a piece any more: the oldest kept snapshot, from which the log is replayed
/// from `oldest` on, contains it, or the history of its term ends before it.
pub fn is_needless(piece: Piece, record: &Record, oldest: LogPosition) -> bool {
    let base = record.bases.iter().find(|base| base.term == piece.term);
    let is_behind = || piece.term < record.tip.term && base.is_none_or(|base| piece.end > base.end);
    piece.end <= oldest || is_behind()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::owner::record::{Base, sample};

    fn at(segment: u64, offset: u64) -> LogPosition {
        LogPosition { segment, offset }
    }

    fn piece(term: u64, begin: LogPosition, end: LogPosition) -> Piece {
        Piece { term, begin, end }
    }

    #[test]
    fn names_are_read_back_and_sort_as_the_pieces_do() {
        let mut pieces = [
            piece(9, at(1, 0), at(1, 10)),
            piece(10, at(1, 0), at(1, 9)),
            piece(10, at(1, 9), at(1, 100)),
            piece(10, at(1, 100), at(2, 0)),
            piece(10, at(16, 0), at(16, u64::MAX)),
        ];
        let mut names: Vec<_> = pieces.iter().rev().map(Piece::name).collect();
        names.sort_unstable();
        pieces.sort_unstable();
        assert_eq!(
            names.iter().map(|name| Piece::parse(name)).collect::<Vec<_>>(),
            pieces.iter().copied().map(Some).collect::<Vec<_>>()
        );
        let name = &names[0];
        let empty = piece(1, at(1, 5), at(1, 5)).name();
        let others = [
            String::new(),
            "latest".to_owned(),
            empty,
            format!("{name}-"),
            format!("{name}0"),
            name[1..].to_owned(),
            name.replace('9', "g"),
            name.to_uppercase().replace('9', "A"),
            name.replacen('0', "+", 1),
        ];
        for name in others {
            assert_eq!(Piece::parse(&name), None, "{name}");
        }
    }

    #[test]
    fn pieces_are_cut_at_whole_frames_and_at_the_end_of_a_segment() {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for offset in 0..5 {
            frame::durable(&mut bytes, offset);
            ends.push(bytes.len());
        }
        frame::seal(&mut bytes);
        for most in 0..=bytes.len() + 1 {
            let whole = ends.iter().rev().find(|end| **end <= most).unwrap_or(&ends[0]);
            assert_eq!(cut(&bytes, most), Cut { bytes: *whole, next: None }, "{most}");
        }
        for length in 0..bytes.len() {
            let whole = ends.iter().rev().find(|end| **end <= length).unwrap_or(&0);
            assert_eq!(cut(&bytes[..length], usize::MAX).bytes, *whole, "a torn frame is not copied");
        }
        let whole = bytes.len();
        let mut ended = bytes.clone();
        frame::end(&mut ended, 8);
        frame::seal(&mut ended[whole..]);
        let length = ended.len();
        assert_eq!(cut(&ended, usize::MAX), Cut { bytes: length, next: Some(8) });
        assert_eq!(cut(&ended, whole).next, None);
        // Zeros that are written ahead, and frames of nobody.
        let filled = [&bytes[..], &[0; 4096]].concat();
        assert_eq!(cut(&filled, usize::MAX).bytes, whole);
        let behind = [&ended[..], &bytes[..]].concat();
        assert_eq!(cut(&behind, usize::MAX), Cut { bytes: length, next: Some(8) });
    }

    #[test]
    fn copied_is_the_place_before_the_first_gap_or_a_snapshot_after_it() {
        let places = [at(1, 0), at(1, 5), at(1, 9), at(2, 0), at(2, 7)];
        let pieces: Vec<_> = places.windows(2).map(|two| piece(1, two[0], two[1])).collect();
        let mut progress = Progress::new(places[0]);
        for (index, copied) in [(2, 0), (1, 0), (0, 3), (3, 4)] {
            progress.add(pieces[index]);
            assert_eq!(progress.copied(), places[copied]);
        }
        let mut progress = Progress::new(places[0]);
        progress.add(pieces[3]);
        progress.add(pieces[1]);
        progress.add_snapshot(at(2, 0));
        assert_eq!(progress.copied(), places[4]);
        progress.add(pieces[0]);
        progress.add_snapshot(at(1, 0));
        assert_eq!(progress.copied(), places[4], "it never goes back");
        assert!(progress.ahead.is_empty());
    }

    /// Terms 1, 3 and 5, of which the first two end at (2, 50) and (3, 10).
    fn copied() -> (Record, Vec<Piece>) {
        let pieces = vec![
            piece(1, at(1, 0), at(2, 0)),
            piece(1, at(2, 0), at(2, 50)),
            piece(3, at(3, 0), at(3, 10)),
            piece(5, at(3, 10), at(4, 0)),
            piece(5, at(4, 0), at(4, 100)),
            piece(5, at(4, 100), at(4, 120)),
        ];
        (sample(), pieces)
    }

    #[test]
    fn a_history_follows_the_terms_to_their_ends() {
        let (record, pieces) = copied();
        for (from, first) in [(at(1, 0), 0), (at(2, 0), 1), (at(3, 0), 2), (at(4, 0), 4)] {
            let found = history(&pieces, &record, from).unwrap();
            assert_eq!((&found.pieces[..], found.end), (&pieces[first..], at(4, 120)), "{from:?}");
        }
        // A snapshot after the last piece.
        let found = history(&pieces, &record, at(5, 0)).unwrap();
        assert_eq!(found, History { pieces: Vec::new(), end: at(5, 0) });
        // A piece that nothing promises ends the history, if it is missing.
        let gap = [&pieces[..5], &[piece(5, at(4, 130), at(4, 140))]].concat();
        assert_eq!(history(&gap, &record, at(1, 0)).unwrap().end, at(4, 100));
    }

    #[test]
    fn ten_thousand_pieces_are_one_history() {
        let (_, shortest) = copied();
        let begin = shortest.last().unwrap().end;
        let places = (0..=10_000).map(|k| at(begin.segment, begin.offset + 10 * k));
        let places: Vec<_> = places.collect();
        let more = places.windows(2).map(|two| piece(5, two[0], two[1]));
        let pieces: Vec<_> = shortest.into_iter().chain(more).collect();
        let found = history(&pieces, &sample(), at(1, 0)).unwrap();
        assert_eq!((found.pieces.len(), found.end), (10_006, places[10_000]));
        let needless = pieces.iter().filter(|piece| is_needless(**piece, &sample(), places[5000]));
        assert_eq!(needless.count(), 5006);
    }

    #[test]
    fn late_pieces_of_older_terms_do_not_exist() {
        let (record, mut pieces) = copied();
        let expected = history(&pieces, &record, at(1, 0)).unwrap();
        let late =
            [piece(1, at(2, 50), at(3, 0)), piece(1, at(3, 0), at(3, 10)), piece(3, at(3, 10), at(9, 0))];
        pieces.splice(0..0, late);
        assert_eq!(history(&pieces, &record, at(1, 0)).unwrap(), expected);
        let mut opened = record;
        opened.bases.push(Base { term: 5, end: at(4, 100), begin: at(4, 100) });
        (opened.term, opened.tip) = (6, Tip { term: 6, incarnation: 1, copied: at(4, 100) });
        assert_eq!(
            history(&pieces, &opened, at(1, 0)).unwrap().end,
            at(4, 100),
            "term 6 has written nothing"
        );
        for piece in late {
            assert!(is_needless(piece, &opened, at(1, 0)), "{piece:?}");
        }
    }

    #[test]
    fn a_missing_piece_before_a_recorded_place_is_damage() {
        let (record, pieces) = copied();
        for missing in 0..5 {
            let mut left = pieces.clone();
            left.remove(missing);
            let error = history(&left, &record, at(1, 0)).unwrap_err();
            assert!(error.message.contains("is missing") && error.expected.is_some(), "{missing}: {error}");
        }
    }

    #[test]
    fn pieces_that_a_kept_snapshot_needs_stay() {
        let (record, pieces) = copied();
        for (oldest, needless) in [(at(1, 0), 0), (at(2, 0), 1), (at(3, 0), 2), (at(4, 0), 4), (at(9, 0), 6)]
        {
            let found = pieces.iter().filter(|piece| is_needless(**piece, &record, oldest)).count();
            assert_eq!(found, needless, "{oldest:?}");
            let kept: Vec<_> =
                pieces.iter().copied().filter(|piece| !is_needless(*piece, &record, oldest)).collect();
            history(&kept, &record, oldest).unwrap();
        }
        // A server whose record is old removes nothing of the next one.
        assert!(!is_needless(piece(6, at(4, 0), at(5, 0)), &record, at(4, 0)));
    }
}
