//! The screen of `fastps top`: state, rates and a sparkline of staleness, shards, workers, warnings, keys.

use super::keys::HELP;
use super::lines::rates;
use super::state::State;
use super::tables;
use crate::status::{sentence, slowness, warnings};
use fastps_core::text::printable;
use ratatui::backend::TestBackend;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Clear, Paragraph, Sparkline};
use ratatui::{Frame, Terminal};

/// Width of the screen where there is no terminal.
const WIDTH: u16 = 80;
/// Rows of the sparkline.
const CHART: u16 = 2;
/// Most shards and warnings shown.
const MAX_SHARDS: usize = 8;
const MAX_WARNINGS: usize = 4;

/// Styles; colours are left out where `NO_COLOR` is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theme {
    has_colour: bool,
}

impl Theme {
    pub(super) fn of_environment() -> Self {
        Self { has_colour: std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty()) }
    }

    fn with(self, colour: Color, modifier: Modifier) -> Style {
        let style = Style::new().add_modifier(modifier);
        if self.has_colour { style.fg(colour) } else { style }
    }

    fn title(self) -> Style {
        self.with(Color::Cyan, Modifier::BOLD)
    }

    fn warning(self) -> Style {
        self.with(Color::Yellow, Modifier::BOLD)
    }
}

/// Draws the screen.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State, theme: Theme) {
    let parts = Parts::of(state, theme, frame.area().width);
    let warnings = parts.warnings.len() as u16;
    let shards = parts.shards.len() as u16;
    let [head, chart, above, workers, below, keys] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(CHART),
        Constraint::Length(shards + 1),
        Constraint::Min(1),
        Constraint::Length(warnings),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(Text::from(parts.head)), head);
    frame.render_widget(sparkline(state, chart, theme), chart);
    frame.render_widget(Paragraph::new(Text::from(parts.shards)), above);
    frame.render_widget(Paragraph::new(Text::from(parts.workers)), workers);
    frame.render_widget(Paragraph::new(Text::from(parts.warnings)), below);
    frame.render_widget(Paragraph::new(parts.keys), keys);
    if state.shows_help {
        help(frame, theme);
    }
}

/// The screen as text without colours, as high as it needs to be.
pub(super) fn text(state: &State) -> Result<Vec<String>, std::convert::Infallible> {
    let theme = Theme { has_colour: false };
    let parts = Parts::of(state, theme, WIDTH);
    let rows = 4 + parts.shards.len() + 1 + parts.workers.len() + parts.warnings.len();
    // Nothing reads keys.
    let mut terminal = Terminal::new(TestBackend::new(WIDTH, rows as u16 + 1))?;
    terminal.draw(|frame| draw(frame, state, theme))?;
    let buffer = terminal.backend().buffer();
    let line = |y: u16| {
        let cells = (0..WIDTH).filter_map(|x| Some(buffer.cell((x, y))?.symbol()));
        cells.collect::<String>().trim_end().to_owned()
    };
    let mut lines: Vec<_> = (0..rows as u16).map(line).collect();
    lines.truncate(lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1));
    Ok(lines)
}

/// The lines of the screen.
struct Parts {
    head: Vec<Line<'static>>,
    shards: Vec<Line<'static>>,
    workers: Vec<Line<'static>>,
    warnings: Vec<Line<'static>>,
    keys: Line<'static>,
}

impl Parts {
    fn of(state: &State, theme: Theme, width: u16) -> Self {
        let paused = if state.is_paused { "  PAUSED" } else { "" };
        let keys = format!("q quit  p pause  s sort: {}  ? help", state.sort.name());
        let (title, mut warned) = match &state.looks {
            Some(looks) => (printable(&sentence(looks)), warnings(&looks.now)),
            None => ("no answer yet".to_owned(), Vec::new()),
        };
        if let Some(error) = &state.error {
            warned.insert(0, error.to_string());
        }
        let more = warned.len().saturating_sub(MAX_WARNINGS);
        let mut warnings: Vec<_> = warned.into_iter().take(MAX_WARNINGS).collect();
        if more > 0 {
            warnings.push(format!("... and {more} more: fastps status"));
        }
        let styled = |text: String, style| Line::from(Span::styled(text, style));
        Self {
            head: vec![
                Line::from(vec![Span::styled(title, theme.title()), Span::styled(paused, theme.warning())]),
                Line::from(rates(state)),
            ],
            shards: shards(state, theme),
            workers: workers(state, theme, width),
            warnings: warnings
                .into_iter()
                .map(|text| styled(printable(&format!("! {text}")), theme.warning()))
                .collect(),
            keys: styled(keys, Style::new().add_modifier(Modifier::DIM)),
        }
    }
}

fn shards(state: &State, theme: Theme) -> Vec<Line<'static>> {
    let Some(looks) = &state.looks else { return Vec::new() };
    let mut lines = titled(tables::shards(looks, MAX_SHARDS), theme);
    // Shards in trouble are highlighted.
    for line in lines.iter_mut().skip(1) {
        let text = line.to_string();
        if ["no answer", "late", "refuses", "not durable"].iter().any(|bad| text.contains(bad)) {
            *line = Line::from(Span::styled(text, theme.warning()));
        }
    }
    lines
}

fn workers(state: &State, theme: Theme, width: u16) -> Vec<Line<'static>> {
    let found = state.workers();
    if found.is_empty() {
        return Vec::new();
    }
    let mut lines = titled(tables::workers(&found, width.into()), theme);
    for (line, (_, report)) in lines.iter_mut().skip(1).zip(&found) {
        if slowness(&found, report).is_some() {
            *line = Line::from(Span::styled(line.to_string(), theme.warning()));
        }
    }
    lines
}

/// A table whose first line is its titles.
fn titled(lines: Vec<String>, theme: Theme) -> Vec<Line<'static>> {
    let style = |k| if k == 0 { theme.title() } else { Style::new() };
    lines.into_iter().enumerate().map(|(k, line)| Line::from(Span::styled(line, style(k)))).collect()
}

/// The newest staleness at the right.
fn sparkline(state: &State, area: Rect, theme: Theme) -> Sparkline<'static> {
    let skipped = state.staleness.len().saturating_sub(area.width as usize);
    let shown: Vec<u64> = state.staleness.iter().skip(skipped).copied().collect();
    Sparkline::default().data(shown).style(theme.with(Color::Green, Modifier::empty()))
}

fn help(frame: &mut Frame<'_>, theme: Theme) {
    let lines: Vec<_> = HELP.iter().map(|(key, effect)| Line::from(format!(" {key}  {effect}"))).collect();
    let widest = lines.iter().map(Line::width).max().unwrap_or(0) as u16;
    let (all, height) = (frame.area(), HELP.len() as u16 + 2);
    let width = (widest + 3).min(all.width);
    let area = Rect::new(
        (all.width - width) / 2,
        all.height.saturating_sub(height) / 2,
        width,
        height.min(all.height),
    );
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" Keys ").title_style(theme.title());
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use super::super::state::tests::state;
    use super::*;

    fn drawn(state: &State, (width, height): (u16, u16), has_colour: bool) -> TestBackend {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state, Theme { has_colour })).unwrap();
        terminal.backend().clone()
    }

    #[test]
    fn everything_fits_80_columns() {
        let state = state(&[("a worker with quite a long name", 0.1, 3), ("b", 0.1, 1), ("c", 4.0, 90)]);
        let text = text(&state).unwrap().join("\n");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        for part in [
            "1 shard serving, version 1.2.3; 3 workers",
            "250 pushes/s, - pulls/s, staleness p99 90",
            "SHARD",
            "WORKER",
            "a worker with",
            "slow",
            "! worker c is slow",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("q quit"), "nothing reads keys");
        assert!(text.contains('█'), "the sparkline\n{text}");
    }

    #[test]
    fn warnings_that_do_not_fit_are_counted() {
        let workers = |slow| {
            let quick = (0..6).map(|_| ("quick", 0.1, 1));
            quick.chain((0..slow).map(|_| ("slow", 4.0, 1))).collect::<Vec<_>>()
        };
        for (slow, more) in [(4, None), (5, Some("! ... and 1 more"))] {
            let text = text(&state(&workers(slow))).unwrap().join("\n");
            assert_eq!(text.matches("! worker slow is slow").count(), MAX_WARNINGS, "{text}");
            assert_eq!(more.is_some(), text.contains("more: fastps status"), "{text}");
            assert!(more.is_none_or(|more| text.contains(more)), "{text}");
        }
    }

    #[test]
    fn small_screens_are_drawn_and_without_colour_none_is_used() {
        let mut state = state(&[("a", 0.1, 3), ("b", 0.1, 1), ("c", 4.0, 9)]);
        (state.shows_help, state.is_paused) = (true, true);
        for size in [(80, 24), (20, 5), (1, 1), (200, 60)] {
            for has_colour in [true, false] {
                let backend = drawn(&state, size, has_colour);
                let cells = &backend.buffer().content;
                let coloured = cells.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
                assert!(!coloured || has_colour, "{size:?}");
            }
        }
        let shown = drawn(&state, (80, 24), false).to_string();
        for part in ["PAUSED", "Keys", "sort the workers", "q quit  p pause  s sort: rank"] {
            assert!(shown.contains(part), "{part}\n{shown}");
        }
    }
}
