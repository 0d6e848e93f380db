//! `headwater machine exec`: runs a command in a guest, through its guest agent.

use std::io::{IsTerminal, Read, Write};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_api::{ExecRequest, ExecResult, MAX_STDIN_BYTES};
use headwater_block::size;

use crate::client::Client;
use crate::failure::invalid;
use crate::show::{self, progress::said_if_slow};

/// The exit code if the output was cut, because a script could otherwise take it for complete.
const CUT: u8 = 1;

/// Runs the command. Its output and its exit code become those of this program.
pub async fn run(client: &Client, name: &str, request: &ExecRequest, json: bool) -> anyhow::Result<u8> {
    let what = format!(
        "waiting for the command in {name}, or until the guest has booted and its agent answers; Ctrl-C ends it"
    );
    // If standard error is not a terminal, a program may parse the command's errors there.
    let quiet = json || !std::io::stderr().is_terminal();
    let result = said_if_slow(quiet, &what, client.exec(name, request)).await?;
    let code = exit_code(&result);
    if json {
        show::if_read(show::json(&result))?;
        return Ok(code);
    }
    let decode = |text: &str| STANDARD.decode(text).context("the daemon's answer is not valid Base64");
    show::if_read(show::bytes(&decode(&result.stdout_base64)?))?;
    // Ignored: if standard error is closed, nobody wants to read it.
    let _ = std::io::stderr().write_all(&decode(&result.stderr_base64)?);
    if result.truncated {
        show::aside(
            "headwater: the output was cut: the guest agent returns at most 16 MiB each of standard output and standard error \
             (have the command write to a file, and read that in parts)\n",
        );
    }
    Ok(code)
}

/// Reads this program's standard input to its end.
pub fn standard_input() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    // One byte more, to detect input that is too long.
    let limit = u64::try_from(MAX_STDIN_BYTES)?.saturating_add(1);
    std::io::stdin().lock().take(limit).read_to_end(&mut bytes).context("cannot read the standard input")?;
    if bytes.len() > MAX_STDIN_BYTES {
        let most = size::format(limit - 1);
        return Err(invalid(format!(
            "the standard input is longer than {most}, the most that a command can get"
        )));
    }
    Ok(STANDARD.encode(bytes))
}

fn exit_code(result: &ExecResult) -> u8 {
    // Exit codes of Windows have 32 bits and can be negative here: a failure must never become 0.
    match u8::try_from(result.exit_code).unwrap_or(u8::MAX) {
        0 if result.truncated => CUT,
        code => code,
    }
}
