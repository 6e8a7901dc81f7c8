//! The keys of `fastps top`.

use super::state::State;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// The keys and what they do.
pub(super) const HELP: [(&str, &str); 4] = [
    ("q", "quit (also Esc and Ctrl-C)"),
    ("p", "pause, and continue (also the space bar)"),
    ("s", "sort the workers by rank, slowest, stalest, waiting"),
    ("?", "show and hide this help"),
];

/// Effect of a key on the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    Quit,
}

/// Obeys a key.
pub(super) fn press(state: &mut State, key: KeyEvent) -> Next {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if control => return Next::Quit,
        KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Next::Quit,
        KeyCode::Char('p' | 'P' | ' ') => state.is_paused = !state.is_paused,
        KeyCode::Char('s' | 'S') => state.sort = state.sort.next(),
        KeyCode::Char('?' | 'h' | 'H') => state.shows_help = !state.shows_help,
        _ => {}
    }
    Next::Continue
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_pause_sort_help_and_quit() {
        let mut state = State::default();
        let mut press = |code, modifiers| press(&mut state, KeyEvent::new(code, modifiers));
        for key in ['p', 's', '?', 'x', 'c'] {
            assert_eq!(press(KeyCode::Char(key), KeyModifiers::NONE), Next::Continue, "{key}");
        }
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::CONTROL), Next::Quit);
        assert_eq!(press(KeyCode::Char('q'), KeyModifiers::NONE), Next::Quit);
        assert_eq!(press(KeyCode::Esc, KeyModifiers::NONE), Next::Quit);
        assert!(state.is_paused && state.shows_help);
        assert_eq!(state.sort.name(), "slowest");
    }
}
