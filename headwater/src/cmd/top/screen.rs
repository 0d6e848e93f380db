//! The terminal: the whole screen while `headwater top` runs, and as it was before in every case when it ends.

use anyhow::Context;
use ratatui::crossterm::event::{self, Event as Input};
use ratatui::{DefaultTerminal, Frame};
use tokio::sync::mpsc;

/// So many inputs wait to be taken; a terminal that sends more waits.
const INPUTS_MAX: usize = 1024;

/// The whole screen, until it is dropped. A panic gives the terminal back before its message is printed.
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Takes the screen.
    pub fn enter() -> anyhow::Result<Self> {
        ratatui::try_init().map(Self).context("cannot use the terminal: try --once")
    }

    /// Shows what `draw` draws; only what changed is sent.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> anyhow::Result<()> {
        self.0.draw(draw).map(drop).context("cannot write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // There is nothing to be done about a terminal that is gone.
        let _ = self.0.show_cursor();
        let _ = ratatui::try_restore();
    }
}

/// Keys and changes of the terminal's size. They are read by a thread, because a terminal cannot be read asynchronously.
pub fn inputs() -> mpsc::Receiver<Input> {
    let (sender, receiver) = mpsc::channel(INPUTS_MAX);
    std::thread::spawn(move || {
        while let Ok(input) = event::read() {
            if sender.blocking_send(input).is_err() {
                return;
            }
        }
    });
    receiver
}
