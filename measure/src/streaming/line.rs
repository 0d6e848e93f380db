//! A slow line: two network namespaces of our own, a pair of virtual cards between them that let so much through,
//! and relays of the test kit that make it long.
//!
//! ```text
//!   near: who boots                         far: who serves
//!   10.77.0.1 == tbf 100 Mbit/s == veth ==  10.77.0.2 -- relay, 2 ms each way -- 127.0.0.1
//! ```
//!
//! The kernels that this is for have no netem, hence the relay. The bucket of tbf holds a few packets, so that
//! short answers take their time on the line as well.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use headwater_testkit::DelayRelay;

use crate::iscsi::free_port;
use crate::systems::Process;
use crate::targets::Unavailable;

/// The server's end.
pub const FAR: &str = "10.77.0.2";
const NEAR: &str = "10.77.0.1";
const RATE: [&str; 6] = ["rate", "100mbit", "burst", "16kb", "latency", "100ms"];
const PATIENCE: Duration = Duration::from_secs(20);

/// The line. It goes with its namespaces when this is dropped.
pub struct Line {
    relays: Vec<Process>,
    far: Process,
    near: Process,
    /// Not root: namespaces of users make us root in them.
    is_user: bool,
}

impl Line {
    /// Sets it up. [`Unavailable`] where namespaces are forbidden.
    pub fn start() -> Result<Self> {
        let is_user = !rustix::process::geteuid().is_root();
        let mut first = Command::new("unshare");
        first.args(if is_user { &["--user", "--map-root-user"][..] } else { &[] });
        let near = hold(first).map_err(|e| {
            Unavailable(format!("a slow line needs namespaces of its own, which are forbidden here: {e:#}"))
        })?;
        // Both belong to the same user namespace, if there is one: who is root in it may join them.
        let mut second = Command::new(if is_user { "nsenter" } else { "unshare" });
        if is_user {
            let target = near.pid().to_string();
            second.args(["--target", &target, "--user", "--preserve-credentials", "unshare"]);
        }
        let far = hold(second)?;
        let line = Self { relays: Vec::new(), far, near, is_user };
        line.connect().map_err(|e| {
            Unavailable(format!("a slow line needs veth and tbf, and this kernel has not both: {e:#}"))
        })?;
        Ok(line)
    }

    /// Lays it between the two ends.
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
        // Where Debian keeps ip and tc, which are not in every user's path.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/sbin:/sbin")).arg(program);
        command
    }

    /// Relays from a port of [`FAR`] to one of the loopback address there; returns the former.
    pub fn relay(&mut self, port: u16, delay_ms: u64) -> Result<u16> {
        let at = free_port()?;
        let program = std::env::current_exe().context("cannot tell where this program lies")?;
        let mut command = self.far(&program);
        command.args([
            "--relay",
            &format!("{FAR}:{at}=127.0.0.1:{port}"),
            "--delay-ms",
            &delay_ms.to_string(),
        ]);
        let mut relay = Process::start(&mut command, "relay")?;
        relay.wait_until_said("relaying", PATIENCE)?;
        self.relays.push(relay);
        Ok(at)
    }
}

/// A process that keeps a new network namespace.
fn hold(mut command: Command) -> Result<Process> {
    command.args(["--net", "sh", "-c", "echo held; exec sleep 1000000"]);
    let mut holder = Process::start(&mut command, "unshare")?;
    holder.wait_until_said("held", PATIENCE)?;
    Ok(holder)
}

fn check(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// What `--relay LISTEN=TARGET` does, until it is ended.
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
