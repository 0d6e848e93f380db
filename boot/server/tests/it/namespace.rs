//! Two network namespaces connected by a virtual cable, for tests with real DHCP servers and clients.
//!
//! ```text
//!   the test: near0 10.77.0.2/24 ======= far0 (10.77.0.1/24 if a server runs there): programs of `Far::command`
//! ```
//! A test begins with [`enter`], which runs the test again in a new namespace, so that the host's network is not
//! touched.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use headwater_dhcp::Packet;

/// Environment variable that is set inside the namespace.
const INSIDE: &str = "HEADWATER_TEST_NAMESPACE";
/// The test's end of the cable.
pub const NEAR: &str = "near0";
/// The other end of the cable.
pub const FAR: &str = "far0";

/// Returns `true` inside the namespace. Otherwise runs the test again inside a new one, and returns `false`.
pub fn enter(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut command = Command::new("unshare");
    // A user other than root becomes root of a user namespace.
    if !is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let program = std::env::current_exe().unwrap();
    command.args(["--net", "--"]).arg(program).args(["--exact", test, "--nocapture", "--include-ignored"]);
    let output = command.env(INSIDE, "1").stdin(Stdio::null()).output().expect("unshare is installed");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().any(|line| line.starts_with("Uid:\t0\t"))
}

/// Runs a program to its end, and returns its output.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    said.into_owned()
}

/// The other namespace. Dropping it removes the namespace.
pub struct Far(Child);

impl Far {
    /// Makes the other namespace, and the cable.
    pub fn connect() -> Self {
        let mut child = Command::new("unshare");
        child.args(["--net", "sh", "-c", "echo; exec sleep infinity"]).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        // The namespace exists as soon as the process has written a line.
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let far = Self(child);
        let pid = far.0.id().to_string();
        let ip = |arguments: &[&str]| run(Command::new("ip").args(arguments));
        ip(&["link", "set", "lo", "up"]);
        ip(&["link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", &pid]);
        ip(&["address", "add", "10.77.0.2/24", "dev", NEAR]);
        ip(&["link", "set", NEAR, "up"]);
        run(far.command("ip").args(["link", "set", FAR, "up"]));
        far
    }

    /// A command that runs in the other namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.0.id().to_string(), "--net", "--", program]).stdin(Stdio::null());
        command
    }

    /// Gives the other end of the cable an address.
    pub fn set_address(&self, address: &str) {
        run(self.command("ip").args(["address", "add", address, "dev", FAR]));
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A background program that is killed at the end of a test.
pub struct Background(pub Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A DHCP client that sends hand-made packets.
pub struct Client(UdpSocket);

impl Client {
    /// Opens the client's socket at the test's end of the cable.
    pub fn new() -> Self {
        let socket = headwater_boot_server::interface::udp(NEAR, 68).unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        Self(socket)
    }

    /// Sends the packet repeatedly until an answer arrives.
    pub fn ask(&self, asked: &Packet) -> Packet {
        let to = SocketAddr::from((Ipv4Addr::BROADCAST, 67));
        let mut buffer = [0; 1500];
        for _ in 0..60 {
            self.0.send_to(&asked.bytes(), to).unwrap();
            while let Ok(len) = self.0.recv(&mut buffer) {
                match Packet::parse(&buffer[..len]) {
                    Ok(answer) if answer.xid == asked.xid && answer.is_reply => return answer,
                    _ => {}
                }
            }
        }
        panic!("no answer to {asked:?}");
    }
}
