//! `headwater machine exec`: run a command in a guest.

use std::io::{IsTerminal, Read, Write};

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_api::{ExecRequest, ExecResult, MAX_STDIN_BYTES};
use headwater_block::size;

use crate::client::Client;
use crate::failure::invalid;
use crate::show::{self, progress::said_if_slow};

/// The code where the output is not whole: a command that succeeded would pass for one that printed all of it.
const CUT: u8 = 1;

/// Runs the command; its output becomes ours, and its exit code too.
pub async fn run(client: &Client, name: &str, request: &ExecRequest, json: bool) -> anyhow::Result<u8> {
    let what = format!(
        "waiting for the command in {name}, or for the guest to be up and its agent to answer; Ctrl-C ends it"
    );
    // Elsewhere a program may read what the command says there.
    let quiet = json || !std::io::stderr().is_terminal();
    let result = said_if_slow(quiet, &what, client.exec(name, request)).await?;
    let code = exit_code(&result);
    if json {
        show::if_read(show::json(&result))?;
        return Ok(code);
    }
    let decode = |text: &str| STANDARD.decode(text).context("cannot understand the daemon's answer");
    show::if_read(show::bytes(&decode(&result.stdout_base64)?))?;
    // Where standard error is closed, its reader wants none of it.
    let _ = std::io::stderr().write_all(&decode(&result.stderr_base64)?);
    if result.truncated {
        show::aside(
            "headwater: the output is not whole: the guest agent keeps 16 MiB each of standard output and standard error \
             (have the command write to a file, and read that in parts)\n",
        );
    }
    Ok(code)
}

/// All of our standard input.
pub fn standard_input() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    // One more, to see that there is more.
    let limit = u64::try_from(MAX_STDIN_BYTES)?.saturating_add(1);
    std::io::stdin().lock().take(limit).read_to_end(&mut bytes).context("cannot read the standard input")?;
    if bytes.len() > MAX_STDIN_BYTES {
        let most = size::format(limit - 1);
        return Err(invalid(format!(
            "the standard input is longer than {most}, the most that a command is given"
        )));
    }
    Ok(STANDARD.encode(bytes))
}

fn exit_code(result: &ExecResult) -> u8 {
    // Codes of Windows have 32 bits, with a sign here: none of a command that failed may become 0.
    match u8::try_from(result.exit_code).unwrap_or(u8::MAX) {
        0 if result.truncated => CUT,
        code => code,
    }
}
