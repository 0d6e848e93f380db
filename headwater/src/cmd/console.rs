//! `headwater machine console`: connects the terminal to a machine's serial console.

use std::io::{IsTerminal, Read};

use anyhow::Context;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::client::Client;
use crate::show;

/// Ctrl-], as in telnet and virsh.
const LEAVE: u8 = 0x1d;

/// The most typed input that is buffered for a guest that reads none.
const TYPED_AHEAD_MAX_BYTES: usize = 64 << 10;

/// Prints the log, follows it, or attaches to the console.
pub async fn run(client: &Client, name: &str, log: bool, follow: bool) -> anyhow::Result<()> {
    if log || follow {
        return client.console_log(name, follow, show::bytes).await;
    }
    let console = client.attach_console(name).await?;
    let raw = RawTerminal::enter()?;
    if raw.is_some() {
        show::aside(&format!("connected to {name}; Ctrl-] disconnects\r\n"));
    }
    let outcome = exchange(console, keys(), raw.is_some()).await;
    drop(raw);
    outcome
}

/// Copies in both directions: the output of a guest that reads no input is shown, and Ctrl-] works.
async fn exchange(
    console: impl AsyncRead + AsyncWrite,
    mut keys: mpsc::Receiver<Vec<u8>>,
    is_terminal: bool,
) -> anyhow::Result<()> {
    let (mut from_guest, mut to_guest) = tokio::io::split(console);
    let mut piece = vec![0; 16 << 10];
    let (mut ahead, mut is_told) = (Vec::new(), false);
    let mut input_open = true;
    loop {
        tokio::select! {
            read = from_guest.read(&mut piece) => match read {
                Ok(0) => return Ok(()),
                Ok(n) => show::bytes(piece.get(..n).unwrap_or_default())?,
                Err(e) => return Err(e).context("the connection to the console was lost"),
            },
            written = to_guest.write(&ahead), if !ahead.is_empty() => match written {
                Ok(n @ 1..) => {
                    ahead.drain(..n);
                    is_told &= !ahead.is_empty();
                }
                Ok(0) => anyhow::bail!("the connection to the console was closed for input: connect again"),
                Err(e) => return Err(e).context("the connection to the console was lost"),
            },
            // A script waits until its guest reads. On a terminal all keys are read, because one may be Ctrl-].
            pressed = keys.recv(), if input_open && (is_terminal || ahead.is_empty()) => match pressed {
                Some(bytes) if is_terminal && bytes.contains(&LEAVE) => return Ok(()),
                Some(bytes) if ahead.len() + bytes.len() <= TYPED_AHEAD_MAX_BYTES => ahead.extend(bytes),
                Some(_) => {
                    if !std::mem::replace(&mut is_told, true) {
                        show::aside("\r\nthe guest reads no input, so keys are lost; Ctrl-] disconnects\r\n");
                    }
                }
                None if is_terminal => return Ok(()),
                // A script's input has ended; the guest's answer is still printed.
                None => input_open = false,
            },
        }
    }
}

/// The typed input. Read by a thread, because a terminal cannot be read asynchronously.
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

/// Raw mode of the terminal: each key is read at once. Dropping this restores the previous mode.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> anyhow::Result<Option<Self>> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(&stdin).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("cannot change the terminal's settings")?;
        Ok(Some(Self(before)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Ignored: if the terminal is gone, nothing can be done.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A channel with keys that are pressed one after the other.
    fn pressed(pieces: Vec<Vec<u8>>) -> mpsc::Receiver<Vec<u8>> {
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(async move {
            for piece in pieces {
                if sender.send(piece).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }

    #[tokio::test]
    async fn a_guest_that_takes_no_input_can_be_left() {
        let (console, _guest) = tokio::io::duplex(4096);
        let mut pieces = vec![vec![b'x'; 4096]; 256];
        pieces.push(vec![LEAVE]);
        let left = exchange(console, pressed(pieces), true);
        tokio::time::timeout(Duration::from_secs(60), left).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_script_loses_nothing_at_a_guest_that_takes_its_time() {
        let (console, mut guest) = tokio::io::duplex(4096);
        let pieces: Vec<_> = (0..=255).map(|number| vec![number; 4096]).collect();
        let expected = pieces.concat();
        let script = tokio::spawn(exchange(console, pressed(pieces), false));
        let mut typed = vec![0; expected.len()];
        guest.read_exact(&mut typed).await.unwrap();
        assert!(typed == expected, "it took something else");
        drop(guest);
        script.await.unwrap().unwrap();
    }
}
