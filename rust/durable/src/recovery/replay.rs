//! Repeating the records of the log.

use crate::catalog::Event;
use crate::files::damage::Unusable;
use crate::frame::Content;
use crate::log::read::{Beginning, End, beginning, read};
use crate::log::scan::count_pushes;
use crate::recovery::Recovery;
use fastps_core::error::{Kind, Result};
use fastps_core::record::Record;
use fastps_core::shard::Shard;
use fastps_core::tensor::SliceId;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Recovery<'_> {
    /// Repeats what the log says from a segment on.
    pub(super) fn replay(&mut self, first: Option<u64>) -> Result<(), Unusable> {
        let mut next = first;
        while let Some(number) = next.take() {
            self.reached = number;
            match self.replay_segment(number) {
                Ok(End::Continued(following)) => next = Some(following),
                Ok(End::Open { whole, torn }) => {
                    self.last = Some((number, whole));
                    if torn > 0 {
                        self.note_torn(number, whole, torn);
                    }
                    self.look_behind(number)?;
                }
                Err(Unusable::Damaged(why)) if self.settings.accept_loss => {
                    self.renew = true;
                    let pushes = self.count_behind(number)?;
                    self.report.lost.push(format!(
                        "{why}: what comes behind it is lost, as --accept-loss allows, and {pushes} pushes of it that can be read"
                    ));
                }
                Err(unusable) => return Err(unusable),
            }
        }
        Ok(())
    }

    /// Says what is known of the bytes behind the last whole frame.
    fn note_torn(&mut self, number: u64, whole: u64, torn: u64) {
        let (path, durable) = (self.directory.segment(number), self.durable);
        self.report.notes.push(format!(
            "{} ends in {torn} bytes that are no whole record, from byte {whole} on: they are left out. The last sync that the \
             file tells of made its first {durable} bytes durable; whether a later one was complete before the server ended, \
             nothing tells",
            path.display()
        ));
    }

    /// Pushes behind the place where reading a segment has stopped.
    fn count_behind(&self, number: u64) -> Result<u64> {
        let path = |number: &u64| self.directory.segment(*number);
        let mut pushes = 0;
        if self.segments.contains(&number) {
            pushes += count_pushes(&path(&number), self.rest)?;
        }
        // Those of another server are told by themselves.
        let one = self.history.fork().is_none();
        for later in self.segments.range(number + 1..).filter(|_| one) {
            pushes += count_pushes(&path(later), 0)?;
        }
        Ok(pushes)
    }

    /// Nothing should follow the segment that is open. One that was just begun may.
    fn look_behind(&mut self, number: u64) -> Result<(), Unusable> {
        for later in self.segments.range(number + 1..) {
            let path = self.directory.segment(*later);
            let why = match beginning(&path)? {
                Some(Beginning { more: false, .. }) => continue,
                Some(Beginning { after_hole: true, .. }) => {
                    "the log could not be written any more, and no snapshot was completed since"
                }
                _ if self.settings.accept_loss => "what lies between is missing, as --accept-loss allows",
                _ => {
                    let open = self.directory.segment(number);
                    let (open, path) = (open.display(), path.display());
                    return Err(Unusable::Damaged(format!("{open} has lost its end: {path} follows it")));
                }
            };
            (self.last, self.renew) = (None, true);
            if self.history.fork().is_some() {
                // It is told with the others.
                continue;
            }
            let pushes = count_pushes(&path, 0)?;
            let left_out = format!("{} is left out: {why}; {pushes} pushes in it", path.display());
            self.report.lost.push(left_out);
        }
        Ok(())
    }

    fn replay_segment(&mut self, number: u64) -> Result<End, Unusable> {
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
            self.repeat(content).map_err(|error| match error.kind {
                Kind::Capacity => Unusable::Failed(error),
                _ => Unusable::Damaged(format!("{} does not fit at byte {at}: {error}", path.display())),
            })?;
            self.rest = at + 1;
            Ok(())
        })?;
        let promised = self.promised.get(&number).copied().unwrap_or(0);
        if let End::Open { whole, .. } = end
            && whole < promised
        {
            let why = format!(
                "{} is damaged at byte {whole}: its first {promised} bytes were durable, as a snapshot tells",
                path.display()
            );
            return Err(Unusable::Damaged(why));
        }
        self.durable = self.durable.max(promised);
        self.growth.replayed += self.at;
        self.growth.segments += 1;
        self.check_origin(origin)?;
        self.origin = Some(origin);
        Ok(end)
    }

    fn repeat(&mut self, content: Content<'_>) -> Result<()> {
        let Some(shard) = self.shard else { return Ok(()) };
        match content {
            Content::Push(record) => self.repeat_push(shard, &record)?,
            Content::Fence(slice, identity) => {
                self.clients.insert(identity.client);
                if !self.gone.contains(&slice.0) {
                    shard.slice(slice)?.replay_fence(identity)?;
                }
            }
            Content::Event(event) => self.repeat_event(shard, &event)?,
            Content::Segment { .. } | Content::Durable(_) | Content::End(_) | Content::Slice(_) => {}
        }
        Ok(())
    }

    fn repeat_push(&mut self, shard: &Shard, record: &Record<'_>) -> Result<()> {
        self.clients.insert(record.identity.client);
        self.clients.extend(record.shared_by.iter().map(|identity| identity.client));
        if self.gone.contains(&record.slice.0) {
            return Ok(());
        }
        let new = shard.slice(record.slice)?.replay(record)?;
        self.report.repeated += u64::from(new);
        Ok(())
    }

    fn repeat_event(&mut self, shard: &Shard, event: &Event) -> Result<()> {
        match event {
            Event::SessionEnded(client) => shard.forget_client(*client),
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

    /// What the last snapshot had freed is gone, and clients without a session are forgotten: their pushes can come no
    /// more.
    pub(super) fn settle(&mut self) {
        let gone = self.gone.iter().copied().collect();
        self.catalog.apply(&Event::Dropped(gone));
        for client in self.clients.difference(&self.catalog.sessions) {
            if let Some(shard) = self.shard {
                shard.forget_client(*client);
            }
        }
    }
}
