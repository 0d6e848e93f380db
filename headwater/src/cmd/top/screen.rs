//! The terminal: full screen while `headwater top` runs, and restored in every case when it ends.

use anyhow::Context;
use ratatui::crossterm::event::{self, Event as Input};
use ratatui::{DefaultTerminal, Frame};
use tokio::sync::mpsc;

/// The most buffered inputs; a terminal that sends more waits.
const INPUTS_MAX: usize = 1024;

/// The full screen, until it is dropped. A panic restores the terminal before its message is printed.
pub struct Screen(DefaultTerminal);

impl Screen {
    /// Switches to the full screen.
    pub fn enter() -> anyhow::Result<Self> {
        ratatui::try_init().map(Self).context("cannot use the terminal: try --once")
    }

    /// Draws with `draw`; only changes are sent to the terminal.
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> anyhow::Result<()> {
        self.0.draw(draw).map(drop).context("cannot write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Ignored: if the terminal is gone, nothing can be done.
        let _ = self.0.show_cursor();
        let _ = ratatui::try_restore();
    }
}

/// Keys and changes of the terminal's size. Read by a thread, because a terminal cannot be read asynchronously.
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
