//! A link's frames to be sent, and those that wait for an answer.

use crate::link::call::payload::Payload;
use crate::link::frames::Frames;
use crate::link::pending::{Pending, Sender, Waiter};
use crate::state::doubt::Doubt;
use crate::state::lost::LostSlice;
use bytes::Bytes;
use fastps_core::error::Error;
use fastps_core::tensor::SliceId;
use fastps_proto::v1 as pb;
use fastps_transport::convert::header::{Completion, Target};
use fastps_transport::convert::{self, Read};
use foldhash::fast::RandomState;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

/// Most unanswered pushes per slice: fewer than a slice remembers, so that each may be sent again.
pub(crate) const MAX_UNANSWERED_PUSHES: u32 = fastps_core::identity::WINDOW as u32 / 2;

/// A frame of a call, not queued yet, and the parts that it carries.
pub(crate) struct Frame {
    pub(crate) parts: Range<usize>,
    pub(crate) header: pb::Header,
    pub(crate) payload: Payload,
}

#[derive(Debug)]
pub(crate) struct Queue {
    /// This link's incarnation.
    pub(crate) client: u64,
    /// The server's incarnation.
    pub(crate) server: u64,
    pub(crate) next_tag: u64,
    /// First frame that was not sent on the present connection.
    pub(crate) cursor: u64,
    pub(crate) frames: Frames,
    /// Frames in doubt whose answer may still come on the present connection.
    pub(crate) late: HashMap<u64, Vec<(Arc<Doubt>, u64)>>,
    /// State of each slice that was pushed or pulled.
    pub(crate) slices: HashMap<u64, Known, RandomState>,
    /// Slices to ask a restarted server about before anything else is sent. Those before the cursor were
    /// asked on the present connection.
    pub(crate) to_ask: VecDeque<u64>,
    pub(crate) ask_cursor: usize,
    /// Slices that these questions are about, by tag.
    pub(crate) asked: HashMap<u64, Vec<u64>>,
    /// Most slices that a question to the server is about.
    pub(crate) most_asked: usize,
    /// Changes that such servers lack, until the last answer has arrived.
    pub(crate) lost: Vec<LostSlice>,
    /// Number of the present stream; 0 = none.
    pub(crate) session: u64,
    pub(crate) sessions: u64,
    pub(crate) stream: Option<Waker>,
    pub(crate) last_error: Option<Error>,
    /// Set when the server has forgotten this incarnation: nothing more is sent under it.
    pub(crate) lease_lost: bool,
    pub(crate) closed: bool,
    /// Set when the present connection must end, because it holds memory of a call that has ended.
    pub(crate) recalled: bool,
    /// Number of frames sent: each renews the session.
    pub(crate) sent: u64,
}

impl Queue {
    pub(crate) fn new(client: u64, server: u64) -> Self {
        Self {
            client,
            server,
            next_tag: 1,
            cursor: 0,
            frames: Frames::default(),
            late: HashMap::new(),
            slices: HashMap::default(),
            to_ask: VecDeque::new(),
            ask_cursor: 0,
            asked: HashMap::new(),
            most_asked: 1,
            lost: Vec::new(),
            session: 0,
            sessions: 0,
            stream: None,
            last_error: None,
            lease_lost: false,
            closed: false,
            recalled: false,
            sent: 0,
        }
    }

    /// Returns whether no sent frame is unanswered, and no more may be sent under the lost lease.
    pub(crate) fn is_drained(&self) -> bool {
        self.lease_lost && !self.frames.values().any(|p| p.attempts > 0)
    }

    pub(crate) fn push(
        &mut self,
        header: pb::Header,
        payload: Payload,
        waiter: Waiter,
        sender: Sender,
    ) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        let (attempts, refused) = (0, None);
        self.frames.insert(tag, Pending { header, payload, waiter, sender, attempts, refused });
        tag
    }

    /// Queues a frame behind all others, to be sent again on the present connection.
    fn requeue(&mut self, pending: Pending) {
        let tag = self.next_tag;
        self.next_tag += 1;
        if let Waiter::Parts(call, parts) = &pending.waiter {
            call.parts[parts.clone()].iter().for_each(|part| part.tag.store(tag, Ordering::Release));
        }
        self.frames.insert(tag, pending);
        self.wake();
    }

    /// Divides all messages of whole slices, because the server that was met does not take them. The order of
    /// frames stays; none is on a connection to that server yet.
    pub(crate) fn divide_all(&mut self) {
        if self.frames.values().any(|pending| convert::are_whole(&pending.header)) {
            for pending in self.frames.extract(|_| true).into_iter().flat_map(Pending::separate) {
                self.requeue(pending);
            }
        }
    }

    /// Divides the frame that was queued last, if it is a message of whole slices.
    pub(crate) fn divide(&mut self, tag: u64) {
        if let Some(pending) = self.frames.remove(tag) {
            pending.separate().into_iter().for_each(|pending| self.requeue(pending));
        }
    }

    /// Sends a refused frame again if it still waits and this is still the connection of `session`; another
    /// connection sends it anyway.
    pub(crate) fn send_again(&mut self, tag: u64, session: u64) {
        if self.session == session
            && let Some(pending) = self.frames.remove(tag)
        {
            self.requeue(pending);
        }
    }

    pub(crate) fn wake(&mut self) {
        if let Some(waker) = self.stream.take() {
            waker.wake();
        }
    }

    /// Counts a push as answered, and keeps the state of its slice.
    pub(crate) fn answered(&mut self, slice: u64, report: Option<SliceReport>) {
        let Some(known) = self.slices.get_mut(&slice) else {
            return;
        };
        let before = known.unanswered;
        known.unanswered = before.saturating_sub(1);
        if let Some(report) = report {
            known.take(report);
        }
        if before == MAX_UNANSWERED_PUSHES {
            self.wake();
        }
    }

    /// Keeps the state of a slice from the answer to a question.
    pub(crate) fn keep(&mut self, slice: u64, report: SliceReport) {
        self.slices.entry(slice).or_default().take(report);
    }

    /// Asks a restarted server about every slice with an acknowledged change.
    pub(crate) fn ask_what_is_left(&mut self) {
        let known = self.slices.iter().filter(|(_, known)| known.version > 0);
        let mut to_ask: Vec<_> = known.map(|(slice, known)| (known.epoch, known.group, *slice)).collect();
        // A question is about slices of one group.
        to_ask.sort_unstable();
        self.to_ask = to_ask.into_iter().map(|(_, _, slice)| slice).collect();
        self.ask_again();
    }

    /// Asks all that is not answered on the present connection.
    pub(crate) fn ask_again(&mut self) {
        (self.ask_cursor, self.asked) = (0, HashMap::new());
    }

    /// The next such question.
    pub(crate) fn question(&mut self) -> Option<pb::Frame> {
        let (mut about, mut of) = (Vec::new(), None);
        while let Some(slice) =
            self.to_ask.get(self.ask_cursor).filter(|_| about.len() < self.most_asked).copied()
        {
            if let Some(known) = self.slices.get(&slice) {
                let Target { group, epoch, .. } = *of.get_or_insert(known.target(SliceId(slice)));
                if (known.group, known.epoch) != (group, epoch) {
                    break;
                }
                about.push(slice);
            }
            self.ask_cursor += 1;
        }
        let target = of?;
        let draft = match &about[..] {
            [_] => convert::header::read(target, Read::Version),
            many => {
                let whole = Target { slice: SliceId(0), ..target };
                convert::header::versions(whole, many.iter().copied())
            }
        };
        let tag = self.next_tag;
        self.next_tag += 1;
        self.asked.insert(tag, about);
        let completion = Completion { tag, client: self.client, ..Completion::default() };
        let header = Some(convert::header::complete(&draft, completion));
        Some(pb::Frame { header, payload: Bytes::new() })
    }

    /// Handles the answer about a slice: its version, and the number of its changes that are the client's.
    pub(crate) fn left(&mut self, shard: u32, slice: u64, version: u64, own: u64) {
        if let Some(known) = self.slices.get_mut(&slice) {
            let gone = known.own.map(|known| known.saturating_sub(own));
            if gone.is_some_and(|gone| gone > 0) || version < known.version {
                self.lost.push(LostSlice { shard, slice, own: gone, seen: known.version, now: version });
            }
            // The restored state may be lost by the next restart, too: only answers to the user's calls count
            // as acknowledged.
            known.version = known.version.min(version);
            known.own = Some(known.own.map_or(own, |known| known.min(own)));
        }
        self.settled(slice);
    }

    /// Forgets a slice that is gone, which every other call will report.
    pub(crate) fn gone(&mut self, slice: u64) {
        self.slices.remove(&slice);
        self.settled(slice);
    }

    /// Ends the questions about a slice.
    pub(crate) fn settled(&mut self, slice: u64) {
        if let Some(at) = self.to_ask.iter().position(|asked| *asked == slice) {
            self.to_ask.remove(at);
            self.ask_cursor = self.ask_cursor.saturating_sub(usize::from(at < self.ask_cursor));
        }
        if self.to_ask.is_empty() {
            self.wake();
        }
    }
}

/// A link's knowledge of a slice.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Pushes that were sent on the present connection and not answered.
    pub(crate) unanswered: u32,
    /// Group in the slice's route.
    group: u32,
    epoch: u64,
    /// The newest version in an answer; 0 if none.
    version: u64,
    /// Number of its changes that are the client's; `None` if they were counted for another incarnation.
    own: Option<u64>,
}

/// State of a slice in an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SliceReport {
    pub(crate) group: u32,
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    pub(crate) own: u64,
}

impl Known {
    fn target(&self, slice: SliceId) -> Target {
        Target { slice, group: self.group, epoch: self.epoch }
    }

    fn take(&mut self, report: SliceReport) {
        (self.group, self.epoch) = (report.group, report.epoch);
        self.version = self.version.max(report.version);
        self.own = Some(self.own.unwrap_or(0).max(report.own));
    }

    /// Drops the count of own changes, which belonged to another incarnation.
    pub(crate) fn renew(&mut self) {
        self.own = None;
    }
}
