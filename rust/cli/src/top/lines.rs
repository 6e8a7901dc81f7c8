//! `fastps top` as lines of text, for output that is not a terminal.

use super::state::State;
use crate::status::{number, sentence, warnings};
use fastps_server::human;

/// One line: time of day (UTC), state, rates and the first warning.
pub(super) fn summary(state: &State) -> String {
    let seconds = human::now() % 86_400;
    let time = format!("{:02}:{:02}:{:02}Z", seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (&state.error, &state.looks) {
        (Some(error), _) => format!("{time} {error}"),
        (None, None) => format!("{time} no answer yet"),
        (None, Some(looks)) => {
            let found = warnings(&looks.now);
            let more = found.len().saturating_sub(1);
            let warning = match found.first() {
                None => String::new(),
                Some(first) if more == 0 => format!("; warning: {first}"),
                Some(first) => format!("; warning: {first} (and {more} more)"),
            };
            format!("{time} {}; {}{warning}", sentence(looks), rates(state))
        }
    }
}

/// Rates of the whole cluster, and the staleness of its workers.
pub(super) fn rates(state: &State) -> String {
    let rate = |counter| state.rate(counter).map_or_else(|| "-".to_owned(), number);
    let stale = state.staleness.back().map_or_else(|| "-".to_owned(), ToString::to_string);
    format!("{} pushes/s, {} pulls/s, staleness p99 {stale}", rate("pushes"), rate("pulls"))
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::state;
    use super::*;
    use fastps_core::error::{Error, Kind};
    use std::time::Instant;

    #[test]
    fn a_line_has_state_rates_and_warnings() {
        let mut state = state(&[("a", 0.1, 3), ("b", 0.1, 1), ("c", 4.0, 9)]);
        let line = summary(&state);
        assert!(
            line.contains("Z 1 shard serving, version 1.2.3; 3 workers; 250 pushes/s, - pulls/s, "),
            "{line}"
        );
        assert!(line.contains("staleness p99 9; warning: worker c is slow"), "{line}");
        state.looked(Err(Error::new(Kind::Connection, "no shard answers")), Instant::now());
        assert!(summary(&state).ends_with("Z no shard answers"));
        assert!(summary(&State::default()).ends_with("Z no answer yet"));
    }
}
