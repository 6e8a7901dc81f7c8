//! A lasting failure: logged at once, and again at growing intervals; attempts are repeated at growing
//! intervals, too.

use crate::human;
use std::time::{Duration, Instant};

/// Time between the first two log lines; it doubles.
const FIRST_SILENCE: Duration = Duration::from_secs(10);
const LONGEST_SILENCE: Duration = Duration::from_hours(1);
/// Time before the first retry; it doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Trouble(Option<Lasting>);

#[derive(Debug)]
struct Lasting {
    since: Instant,
    times: u64,
    silence: Duration,
    /// Time of the next log line.
    next: Instant,
}

impl Trouble {
    /// Counts a failure. Returns an addition to the log line if one is due.
    pub(super) fn met(&mut self, now: Instant) -> Option<String> {
        let Some(lasting) = &mut self.0 else {
            let (times, silence) = (1, FIRST_SILENCE);
            self.0 = Some(Lasting { since: now, times, silence, next: now + silence });
            return Some(String::new());
        };
        lasting.times += 1;
        if now < lasting.next {
            return None;
        }
        lasting.silence = (2 * lasting.silence).min(LONGEST_SILENCE);
        lasting.next = now + lasting.silence;
        Some(format!(", again, {}", lasting.history(now)))
    }

    /// Time to wait before the next attempt.
    pub(super) fn pause(&self) -> Duration {
        let times = self.0.as_ref().map_or(0, |lasting| lasting.times.saturating_sub(1).min(10));
        (FIRST_PAUSE * (1 << times)).min(LONGEST_PAUSE)
    }

    /// Ends the failure. Returns its duration, for people, if it was logged.
    pub(super) fn over(&mut self, now: Instant) -> Option<String> {
        Some(self.0.take()?.history(now))
    }
}

impl Lasting {
    fn history(&self, now: Instant) -> String {
        format!("for {}", human::duration(now.saturating_duration_since(self.since).as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_lasts_is_said_less_and_less_often() {
        let (mut trouble, begin) = (Trouble::default(), Instant::now());
        assert_eq!((trouble.met(begin), trouble.over(begin)), (Some(String::new()), Some("for 0 s".into())));
        assert_eq!(trouble.over(begin), None);
        let mut said = Vec::new();
        for second in 0..24 * 3600 {
            if let Some(more) = trouble.met(begin + Duration::from_secs(second)) {
                said.push((second, more));
            }
        }
        assert!(said.len() < 40, "{} lines in a day", said.len());
        assert_eq!(said[1], (10, ", again, for 10 s".to_owned()));
        assert!(said.iter().any(|(_, more)| more.contains("again, for 10 min")), "{said:?}");
    }

    #[test]
    fn attempts_become_rare_and_never_end() {
        let (mut trouble, now) = (Trouble::default(), Instant::now());
        let pauses: Vec<_> = (0..100)
            .map(|_| {
                trouble.met(now);
                trouble.pause().as_secs()
            })
            .collect();
        assert_eq!((&pauses[..4], pauses[99]), (&[1, 2, 4, 8][..], 10));
    }
}
