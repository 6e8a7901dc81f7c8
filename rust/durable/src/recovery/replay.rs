//! Replaying the log after the snapshot, and reporting what cannot be replayed.

use crate::catalog::Event;
use crate::files::damage::Unusable;
use crate::frame::{Content, RanProgram};
use crate::log::read::{SegmentEnd, SegmentHeader, beginning, read};
use crate::log::scan::count_pushes;
use crate::recovery::Recovery;
use crate::recovery::moment::Place;
use fastps_core::error::{Kind, Result};
use fastps_core::record::{ProgramRecord, Record};
use fastps_core::shard::Shard;
use fastps_core::tensor::{Apply, SliceId, Space, SpaceId};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Recovery<'_> {
    /// Replays the log, starting with segment `first`.
    pub(super) fn replay(&mut self, first: Option<u64>) -> Result<(), Unusable> {
        let mut next = first;
        while let Some(number) = next.take() {
            self.reached = number;
            match self.replay_segment(number) {
                Ok(SegmentEnd::Continued(following)) => next = Some(following),
                Ok(SegmentEnd::Ahead) => {}
                // A server may be writing the end.
                Ok(SegmentEnd::Open { .. }) if self.stop.is_some() => {}
                Ok(SegmentEnd::Open { whole, torn }) => {
                    self.last = Some((number, whole));
                    if torn > 0 {
                        self.report_torn_end(number, whole, torn);
                    }
                    self.check_later_segments(number)?;
                }
                Err(Unusable::Damaged(why)) if self.settings.accept_loss => {
                    self.renew = true;
                    let pushes = self.count_pushes_after(number)?;
                    self.report.lost.push(format!(
                        "{why}: all later changes are dropped because of --accept-loss, including {pushes} readable pushes"
                    ));
                }
                Err(unusable) => return Err(unusable),
            }
        }
        Ok(())
    }

    /// Reports the bytes after the last whole frame.
    fn report_torn_end(&mut self, number: u64, whole: u64, torn: u64) {
        let (path, durable) = (self.directory.segment(number), self.durable);
        self.report.notes.push(format!(
            "{} ends in {torn} bytes that are not a whole record, from byte {whole} on: they are dropped. The first \
             {durable} bytes are known to have been durable; whether a later sync completed is unknown",
            path.display()
        ));
    }

    /// Counts the pushes after the position where reading a segment failed.
    fn count_pushes_after(&self, number: u64) -> Result<u64> {
        let path = |number: &u64| self.directory.segment(*number);
        let mut pushes = 0;
        if self.segments.contains(&number) {
            pushes += count_pushes(&path(&number), self.rest)?;
        }
        // Files of other servers are reported separately.
        let one = self.history.fork().is_none();
        for later in self.segments.range(number + 1..).filter(|_| one) {
            pushes += count_pushes(&path(later), 0)?;
        }
        Ok(pushes)
    }

    /// No segment should follow an open one, except one that was only begun.
    fn check_later_segments(&mut self, number: u64) -> Result<(), Unusable> {
        for later in self.segments.range(number + 1..) {
            let path = self.directory.segment(*later);
            let why = match beginning(&path)? {
                Some(SegmentHeader { more: false, .. }) => continue,
                Some(SegmentHeader { after_gap: true, .. }) => {
                    "the log could not be written, and no snapshot was completed since"
                }
                _ if self.settings.accept_loss => "the log before it is missing, which --accept-loss permits",
                _ => {
                    let open = self.directory.segment(number);
                    let (open, path) = (open.display(), path.display());
                    return Err(Unusable::Damaged(format!("{open} is truncated: {path} follows it")));
                }
            };
            (self.last, self.renew) = (None, true);
            if self.history.fork().is_some() {
                // Reported with the files of other servers.
                continue;
            }
            let pushes = count_pushes(&path, 0)?;
            let left_out = format!("{} is dropped, with {pushes} pushes: {why}", path.display());
            self.report.lost.push(left_out);
        }
        Ok(())
    }

    fn replay_segment(&mut self, number: u64) -> Result<SegmentEnd, Unusable> {
        let path = self.directory.segment(number);
        if !self.segments.contains(&number) {
            return Err(Unusable::Damaged(format!("{} is missing", path.display())));
        }
        let known = self.origin;
        let mut before = 0;
        self.used.segments.insert(number);
        (self.at, self.rest, self.durable) = (0, 0, 0);
        let (origin, end) = read(&path, number, known, |at, content| {
            self.at = at;
            if let Content::Durable(offset) = content {
                self.durable = self.durable.max(offset);
            }
            self.progress.done.fetch_add(at - before, Ordering::Relaxed);
            before = at;
            if !self.belongs((number, at), &content) {
                return Ok(self.is_over());
            }
            self.replay_content(content).map_err(|error| match error.kind {
                Kind::Capacity => Unusable::Failed(error),
                _ => Unusable::Damaged(format!("{} cannot be applied at byte {at}: {error}", path.display())),
            })?;
            self.rest = at + 1;
            Ok(self.is_over())
        })?;
        let known_durable = self.known_durable.get(&number).copied().unwrap_or(0);
        if let SegmentEnd::Open { whole, .. } = end
            && whole < known_durable
        {
            let why = format!(
                "{} is damaged at byte {whole}: its first {known_durable} bytes were durable according to a snapshot",
                path.display()
            );
            return Err(Unusable::Damaged(why));
        }
        self.durable = self.durable.max(known_durable);
        self.growth.replayed += self.at;
        self.growth.segments += 1;
        self.check_origin(origin)?;
        self.origin = Some(origin);
        Ok(end)
    }

    /// Returns whether a frame belongs to the moment that is restored.
    fn belongs(&mut self, at: Place, content: &Content<'_>) -> bool {
        let (Some(stop), Some(shard)) = (&self.stop, self.shard) else { return true };
        let is_past = at >= stop.at;
        if is_past && self.behind.is_none() {
            let slices = self.catalog.slices().map(|(id, ..)| SliceId(id));
            let version = |slice| shard.slice(slice).map_or(u64::MAX, |slice| slice.version(0).0);
            let lacks = |slice: &SliceId| stop.cap(*slice).is_some_and(|cap| version(*slice) < cap);
            self.behind = Some(slices.filter(lacks).collect());
        }
        let (slice, version) = match content {
            Content::Push(record) if record.apply == Apply::Exact => (record.slice, record.version),
            Content::Program(ran) => (ran.slice, ran.version),
            _ => return !is_past,
        };
        let Some(behind) = self.behind.as_mut().filter(|_| is_past) else {
            return stop.cap(slice).is_none_or(|cap| version <= cap);
        };
        if !behind.contains(&slice) {
            return false;
        }
        // The space of a program may have been opened after the moment.
        let can_run = |ran: &RanProgram<'_>| {
            let space = shard.slice(slice).ok().and_then(|slice| slice.space());
            space.is_some_and(|(space, _)| space.id == ran.command.space)
        };
        let runs = if let Content::Program(ran) = content { can_run(ran) } else { true };
        if !runs || stop.cap(slice) == Some(version) {
            behind.remove(&slice);
        }
        runs
    }

    /// Breaks once nothing that follows can belong to the moment.
    fn is_over(&self) -> ControlFlow<()> {
        match &self.behind {
            Some(behind) if behind.is_empty() => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    }

    fn replay_content(&mut self, content: Content<'_>) -> Result<()> {
        let Some(shard) = self.shard else {
            if let Content::Event(event) = &content {
                self.catalog.apply(event);
            }
            return Ok(());
        };
        match content {
            Content::Push(record) => self.replay_push(shard, &record)?,
            Content::Fence(slice, identity) => {
                self.clients.insert(identity.client);
                if !self.gone.contains(&slice.0) {
                    shard.slice(slice)?.replay_fence(identity)?;
                }
            }
            Content::Event(event) => self.replay_event(shard, &event)?,
            Content::Program(ran) => self.replay_program(shard, &ran)?,
            Content::SpaceOpened(slice, space) => self.replay_opening(shard, slice, &space)?,
            Content::SpaceClosed(slice, space) => self.replay_closing(shard, slice, space)?,
            Content::Segment { .. }
            | Content::Durable(_)
            | Content::End(_)
            | Content::Slice(_)
            | Content::Vectors(_)
            | Content::Array(_)
            | Content::Time(_)
            | Content::Mark(_) => {}
        }
        Ok(())
    }

    fn replay_program(&mut self, shard: &Shard, ran: &RanProgram<'_>) -> Result<()> {
        let RanProgram { slice, version, command, program, sum } = ran;
        if self.gone.contains(&slice.0) {
            return Ok(());
        }
        let (slice, version, command, sum) = (*slice, *version, *command, *sum);
        let record = ProgramRecord { slice, version, command, program, sum };
        let new = shard.slice(slice)?.replay_program(&record)?;
        self.report.repeated += u64::from(new);
        Ok(())
    }

    /// A slice that came from a snapshot with another space has closed this one since.
    fn replay_opening(&self, shard: &Shard, slice: SliceId, space: &Arc<Space>) -> Result<()> {
        if self.gone.contains(&slice.0) {
            return Ok(());
        }
        let slice = shard.slice(slice)?;
        if slice.space().is_none_or(|(open, _)| open.id == space.id) {
            slice.open_space(space)?;
        }
        Ok(())
    }

    fn replay_closing(&self, shard: &Shard, slice: SliceId, space: SpaceId) -> Result<()> {
        if !self.gone.contains(&slice.0) {
            shard.slice(slice)?.close_space(space);
        }
        Ok(())
    }

    fn replay_push(&mut self, shard: &Shard, record: &Record<'_>) -> Result<()> {
        self.clients.insert(record.identity.client);
        self.clients.extend(record.shared_by.iter().map(|identity| identity.client));
        if self.gone.contains(&record.slice.0) {
            return Ok(());
        }
        let new = shard.slice(record.slice)?.replay(record)?;
        self.report.repeated += u64::from(new);
        Ok(())
    }

    fn replay_event(&mut self, shard: &Shard, event: &Event) -> Result<()> {
        match event {
            Event::SessionEnded(client) | Event::SessionOver { client, .. } => shard.forget_client(*client),
            Event::Reserved(_, reservation) => {
                let spec = Arc::new(reservation.spec.clone());
                let slices: Vec<_> =
                    reservation.slices.iter().map(|(id, k)| (SliceId(*id), *k as usize)).collect();
                shard.create(&spec, reservation.group, &slices)?;
            }
            Event::Dropped(slices) => {
                let slices: Vec<_> = slices.iter().map(|id| SliceId(*id)).collect();
                shard.remove(&slices);
            }
            _ => {}
        }
        self.catalog.apply(event);
        Ok(())
    }

    /// Drops slices that were freed during the snapshot, and forgets clients without a session: their pushes
    /// can no longer arrive.
    pub(super) fn forget_stale(&mut self) {
        let gone = self.gone.iter().copied().collect();
        self.catalog.apply(&Event::Dropped(gone));
        for client in self.clients.difference(&self.catalog.sessions) {
            if let Some(shard) = self.shard {
                shard.forget_client(*client);
            }
        }
    }
}
