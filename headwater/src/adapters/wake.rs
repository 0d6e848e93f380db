//! Switches on physical machines, for the service's trait [`Wake`]: with a magic packet on the interface of the boot server, or with a
//! command of the site. It does not wait until the machine is up.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use headwater_api::ProblemKind;
use headwater_boot_server::{Mac, wake};
use headwater_service::backend::{BackendError, Wake};
use tokio::io::AsyncReadExt;

/// How long the command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// The most of what the command prints that is in an error.
const SAID_CHARS: usize = 200;

/// The most bytes of standard error that are kept.
const SAID_MAX_BYTES: u64 = 4096;

/// How physical machines are switched on.
#[derive(Clone, Debug)]
pub enum Waker {
    /// Wake-on-LAN on this interface.
    Packet(String),
    /// This program, with the name of the machine and the address of its card.
    Command(PathBuf),
}

impl Waker {
    /// The command if there is one, else a packet on the interface of the boot server. `None`: neither is there.
    pub fn new(command: Option<PathBuf>, interface: Option<&str>) -> Option<Self> {
        command.map(Self::Command).or_else(|| interface.map(|interface| Self::Packet(interface.to_owned())))
    }
}

#[async_trait]
impl Wake for Waker {
    async fn wake(&self, machine: &str, mac: &str) -> Result<String, BackendError> {
        match self {
            Self::Packet(interface) => {
                let card: Mac = mac.parse().map_err(|_| {
                    BackendError::new(
                        ProblemKind::Invalid,
                        format!("'{mac}' is not the address of a network card"),
                    )
                })?;
                wake::wake(interface, card).map_err(|error| {
                    BackendError::from_io(format!("cannot send a Wake-on-LAN packet on {interface}"), error)
                })?;
                Ok(format!("Wake-on-LAN packet to {mac} on {interface}"))
            }
            Self::Command(program) => run(program, machine, mac).await,
        }
    }
}

async fn run(program: &PathBuf, machine: &str, mac: &str) -> Result<String, BackendError> {
    let shown = program.display();
    let mut command = tokio::process::Command::new(program);
    // The environment of the daemon may have secrets.
    command
        .arg(machine)
        .arg(mac)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let failed = |why: String| {
        let advice =
            "the command gets the machine's name and the MAC address of its card, and must exit with 0";
        BackendError::new(ProblemKind::Failed, format!("{shown} {why}")).advise(advice)
    };
    let cannot_run = |e| BackendError::from_io(format!("cannot run {shown}"), e);
    let mut child = command.spawn().map_err(cannot_run)?;
    let stderr = child.stderr.take();
    let work = async {
        let mut said = Vec::new();
        if let Some(mut stderr) = stderr {
            (&mut stderr).take(SAID_MAX_BYTES).read_to_end(&mut said).await?;
            // The rest is read, so that the program does not wait, and dropped.
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await?;
        }
        Ok::<_, std::io::Error>((child.wait().await?, said))
    };
    let Ok(ended) = tokio::time::timeout(COMMAND_TIMEOUT, work).await else {
        return Err(failed(format!("did not end within {} s, and was killed", COMMAND_TIMEOUT.as_secs())));
    };
    let (status, said) = ended.map_err(cannot_run)?;
    if status.success() {
        return Ok(format!("{shown} {machine} {mac}"));
    }
    let said = String::from_utf8_lossy(&said);
    let said = said.trim().chars().take(SAID_CHARS).map(|c| if c.is_control() { ' ' } else { c });
    Err(failed(format!("ended with {}: {}", status, said.collect::<String>())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    fn program(dir: &Path, text: &str) -> Waker {
        let path = dir.join("wake");
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        Waker::new(Some(path), Some("eth0")).unwrap()
    }

    #[tokio::test]
    async fn a_command_gets_the_name_and_the_card_and_says_whether_it_worked() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join("note");
        let waker = program(dir.path(), &format!("echo \"$@\" >{}", note.display()));
        waker.wake("pc-1", "52:54:00:00:00:01").await.unwrap();
        assert_eq!(std::fs::read_to_string(note).unwrap(), "pc-1 52:54:00:00:00:01\n");
        let waker = program(dir.path(), "echo no such outlet >&2; exit 3");
        let failed = waker.wake("pc-1", "52:54:00:00:00:01").await.unwrap_err();
        assert!(failed.to_string().contains("exit status: 3: no such outlet"), "{failed}");
        let missing = Waker::Command(dir.path().join("none"));
        assert!(missing.wake("pc-1", "").await.unwrap_err().to_string().contains("cannot run"));
        assert!(Waker::new(None, None).is_none());
    }
}
