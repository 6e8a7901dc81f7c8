//! `fastps top` in a terminal.

use super::keys::{Next, press};
use super::screen::{Theme, draw};
use super::state::State;
use super::watch::{Event, Watch};
use ratatui::DefaultTerminal;
use std::io;

/// Draws after each event, until it is stopped; only what has changed is written. The terminal gets its
/// former contents back.
pub(super) async fn run(watch: &mut Watch) -> io::Result<i32> {
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, watch).await;
    ratatui::try_restore()?;
    shown.map(|()| 0)
}

async fn show(terminal: &mut DefaultTerminal, watch: &mut Watch) -> io::Result<()> {
    let (mut state, theme) = (State::default(), Theme::of_environment());
    watch.read_keys()?;
    loop {
        terminal.draw(|frame| draw(frame, &state, theme))?;
        match watch.next().await {
            Event::Looked(found, at) => state.looked(found, at),
            Event::Key(key) if press(&mut state, key) == Next::Quit => return Ok(()),
            Event::Key(_) | Event::Resized => {}
            Event::Stop => return Ok(()),
        }
    }
}
