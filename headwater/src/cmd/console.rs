//! `headwater machine console`: the terminal on a machine's serial console.

use std::io::{IsTerminal, Read};

use anyhow::Context;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::client::Client;
use crate::show;

/// Ctrl-], as telnet and virsh have it.
const LEAVE: u8 = 0x1d;

/// Prints the log, follows it, or connects to the console.
pub async fn run(client: &Client, name: &str, log: bool, follow: bool) -> anyhow::Result<()> {
    if log || follow {
        return client.console_log(name, follow, show::bytes).await;
    }
    let console = client.attach_console(name).await?;
    let raw = RawTerminal::enter()?;
    if raw.is_some() {
        show::aside(&format!("connected to {name}; Ctrl-] leaves\r\n"));
    }
    let outcome = exchange(console, raw.is_some()).await;
    drop(raw);
    outcome
}

async fn exchange(console: crate::client::Console, is_terminal: bool) -> anyhow::Result<()> {
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    let mut keys = keys();
    let mut piece = vec![0; 16 << 10];
    let mut input_open = true;
    loop {
        tokio::select! {
            read = from_guest.read(&mut piece) => match read {
                Ok(0) => return Ok(()),
                Ok(n) => show::bytes(piece.get(..n).unwrap_or_default())?,
                Err(e) => return Err(e).context("the console's connection broke"),
            },
            pressed = keys.recv(), if input_open => match pressed {
                Some(bytes) if is_terminal && bytes.contains(&LEAVE) => return Ok(()),
                Some(bytes) => to_guest.write_all(&bytes).await.context("the console's connection broke")?,
                None if is_terminal => return Ok(()),
                // A script's input is over; what the guest answers is still printed.
                None => input_open = false,
            },
        }
    }
}

/// What is typed. Read by a thread, because a terminal cannot be read asynchronously.
fn keys() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = std::io::stdin().read(&mut piece) {
            if sender.blocking_send(piece.get(..n).unwrap_or_default().to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The terminal gives each key as it is pressed, until this is dropped.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> anyhow::Result<Option<Self>> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin).context("cannot ask for the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("cannot change the terminal's settings")?;
        Ok(Some(Self(before)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // There is nothing to be done about a terminal that is gone.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
