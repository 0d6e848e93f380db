//! Simulates a slow network link: two network namespaces, a pair of virtual network cards between them with limited
//! bandwidth, and TCP relays that add delay.
//!
//! ```text
//!   near: the booting machine                                   far: the server
//!   10.77.0.1 == tbf 100 Mbit/s == veth == tbf 100 Mbit/s == 10.77.0.2 -- relay, delay each way -- 127.0.0.1
//! ```
//!
//! The relay adds the delay, because some kernels lack netem. The bucket of the traffic shaper (tbf) holds only
//! 16 KB, about 11 packets, so that short answers are slowed down too.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_testkit::DelayRelay;

use crate::iscsi::free_port;
use crate::systems::Process;
use crate::targets::Unavailable;

/// Address of the server's end.
pub const FAR: &str = "10.77.0.2";
const NEAR: &str = "10.77.0.1";
const RATE: [&str; 6] = ["rate", "100mbit", "burst", "16kb", "latency", "100ms"];
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The link. Dropping it removes the namespaces.
pub struct Line {
    relays: Vec<Process>,
    far: Process,
    near: Process,
    /// Whether user namespaces are used, because this user is not root.
    is_user: bool,
}

impl Line {
    /// Sets up the link. [`Unavailable`] if namespaces are forbidden on this host.
    pub fn start() -> Result<Self> {
        let is_user = !rustix::process::geteuid().is_root();
        let mut first = Command::new("unshare");
        first.args(if is_user { &["--user", "--map-root-user"][..] } else { &[] });
        let near = hold(first).map_err(|e| {
            Unavailable(format!(
                "a slow network link needs network namespaces, which are forbidden on this host: {e:#}"
            ))
        })?;
        // Both network namespaces belong to the same user namespace, if there is one, so that its root may enter
        // both.
        let mut second = Command::new(if is_user { "nsenter" } else { "unshare" });
        if is_user {
            let target = near.pid().to_string();
            second.args(["--target", &target, "--user", "--preserve-credentials", "unshare"]);
        }
        let far = hold(second)?;
        let line = Self { relays: Vec::new(), far, near, is_user };
        line.connect().map_err(|e| {
            Unavailable(format!(
                "a slow network link needs the programs ip and tc, and a kernel with veth and tbf: {e:#}"
            ))
        })?;
        Ok(line)
    }

    /// Connects the two ends.
    fn connect(&self) -> Result<()> {
        let line = self;
        let far_pid = line.far.pid().to_string();
        let link = ["link", "add", "hw0", "type", "veth", "peer", "name", "hw1", "netns", &far_pid];
        check(line.near(Path::new("ip")).args(link))?;
        type Enter = fn(&Line, &Path) -> Command;
        for (enter, card, address) in [(Line::near as Enter, "hw0", NEAR), (Line::far as Enter, "hw1", FAR)] {
            let ip = || enter(line, Path::new("ip"));
            check(ip().args(["address", "add", &format!("{address}/30"), "dev", card]))?;
            check(ip().args(["link", "set", "lo", "up"]))?;
            check(ip().args(["link", "set", card, "up"]))?;
            let mut tc = enter(line, Path::new("tc"));
            check(tc.args(["qdisc", "add", "dev", card, "root", "tbf"]).args(RATE))?;
        }
        Ok(())
    }

    /// A program that runs at the near end.
    pub fn near(&self, program: &Path) -> Command {
        self.enter(&self.near, program)
    }

    /// A program that runs at the far end.
    pub fn far(&self, program: &Path) -> Command {
        self.enter(&self.far, program)
    }

    fn enter(&self, holder: &Process, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &holder.pid().to_string(), "--net"]);
        command.args(if self.is_user { &["--user", "--preserve-credentials"][..] } else { &[] });
        // Debian's directories of ip and tc, which are not in every user's PATH.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).arg(program);
        command
    }

    /// Starts a relay from a port of [`FAR`] to a loopback port at the far end. Returns the port of [`FAR`].
    pub fn relay(&mut self, port: u16, delay_ms: u64) -> Result<u16> {
        let at = free_port()?;
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let mut command = self.far(&program);
        command.args([
            "--relay",
            &format!("{FAR}:{at}=127.0.0.1:{port}"),
            "--delay-ms",
            &delay_ms.to_string(),
        ]);
        let mut relay = Process::start(&mut command, "relay")?;
        relay.wait_for_output("relaying", START_TIMEOUT)?;
        self.relays.push(relay);
        Ok(at)
    }
}

/// A process that keeps a new network namespace alive.
fn hold(mut command: Command) -> Result<Process> {
    command.args(["--net", "sh", "-c", "echo held; exec sleep 1000000"]);
    let mut holder = Process::start(&mut command, "unshare")?;
    holder.wait_for_output("held", START_TIMEOUT)?;
    Ok(holder)
}

fn check(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Implements `--relay LISTEN=TARGET`; runs until it is killed.
pub fn relay(between: &str, delay_ms: u64) -> Result<()> {
    let (at, target) = between.split_once('=').context("--relay takes LISTEN=TARGET")?;
    let address =
        |text: &str| text.parse::<SocketAddr>().with_context(|| format!("'{text}' is not HOST:PORT"));
    let delay = Duration::from_millis(delay_ms);
    let relay = DelayRelay::listen(address(at)?, address(target)?, delay).context("cannot relay")?;
    println!("relaying at {}", relay.address());
    loop {
        std::thread::park();
    }
}
