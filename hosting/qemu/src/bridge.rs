//! Connects machines to a bridge of the host.
//!
//! QEMU makes a tap interface for its machine's card. The kernel removes the tap when QEMU ends, even if QEMU
//! is killed, so nothing is left behind. Once QEMU runs, [`join`] makes the tap a port of the bridge. `ip` of
//! iproute2 queries and changes the kernel, because it uses the network namespace of this process;
//! `/sys/class/net` shows the namespace of the process that mounted it.
//!
//! Both need the capability CAP_NET_ADMIN. qemu-bridge-helper would give it to other users, but QEMU's
//! system-call filter forbids QEMU to start programs.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::spec::MacAddress;
use crate::{binary, launch};

/// The device that opens tap interfaces.
const TUN_DEVICE: &str = "/dev/net/tun";

/// The number of CAP_NET_ADMIN.
const CAP_NET_ADMIN: u32 = 12;

/// How long `ip` may take.
const IP_TIMEOUT: Duration = Duration::from_secs(20);

/// A bridge to which machines can be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridge {
    name: String,
    /// The longest packet. A port with a smaller limit would lower the limit for the whole bridge.
    mtu: u64,
}

/// The name of the tap interface of a machine: an interface's name has 15 bytes, of which 13 are the first digits of
/// the UUID.
pub fn tap_name(uuid: Uuid) -> String {
    let mut name = format!("hw{}", uuid.simple());
    name.truncate(15);
    name
}

/// The address of a machine's tap interface on the host. It is high, so that no bridge adopts it as its own,
/// and it differs from the guest's.
fn tap_address(mac: MacAddress) -> String {
    let [_, b, c, d, e, f] = mac.0;
    MacAddress([0xfe, b, c, d, e, f]).to_string()
}

/// Finds a bridge, and checks that machines can be connected to it.
pub async fn find(name: &str) -> Result<Bridge> {
    let failed = |reason: String| Error::Bridge { bridge: name.to_owned(), reason };
    may_make_taps().map_err(failed)?;
    let shown = ip(name, &["-json", "-details", "link", "show", "dev", name]).await?;
    if !shown.status.success() {
        return Err(failed(format!(
            "this host has no such interface ({}); for instance 'ip link add {name} type bridge' and 'ip link set {name} up' make it \
             until the next boot of the host",
            said(&shown)
        )));
    }
    let mtu = parse(name, &shown.stdout).map_err(failed)?;
    Ok(Bridge { name: name.to_owned(), mtu })
}

impl Bridge {
    /// Makes the tap interface of a machine a port of the bridge.
    pub async fn join(&self, uuid: Uuid, mac: MacAddress) -> Result<()> {
        let (tap, mtu, address) = (tap_name(uuid), self.mtu.to_string(), tap_address(mac));
        // The address is set before the tap is a port: a bridge without an address of its own takes the
        // lowest of its ports.
        let done = ip(&self.name, &["link", "set", "dev", &tap, "address", &address]).await?;
        if !done.status.success() {
            let reason = format!("'ip' cannot set the address of {tap}: {}", said(&done));
            return Err(Error::Bridge { bridge: self.name.clone(), reason });
        }
        let done =
            ip(&self.name, &["link", "set", "dev", &tap, "mtu", &mtu, "master", &self.name, "up"]).await?;
        if done.status.success() {
            return Ok(());
        }
        let reason = format!("'ip' cannot make {tap} a port of it: {}", said(&done));
        Err(Error::Bridge { bridge: self.name.clone(), reason })
    }
}

/// The MTU of a bridge, from the output of `ip`.
fn parse(name: &str, shown: &[u8]) -> std::result::Result<u64, String> {
    let links: Value =
        serde_json::from_slice(shown).map_err(|error| format!("the output of 'ip' is not JSON: {error}"))?;
    let link = links.get(0).ok_or("'ip' does not list the interface")?;
    if link.pointer("/linkinfo/info_kind").and_then(Value::as_str) != Some("bridge") {
        return Err(format!(
            "'{name}' is an interface, but not a bridge of the Linux kernel; 'ip link show type bridge' lists these"
        ));
    }
    let is_up = link.get("flags").and_then(Value::as_array).is_some_and(|flags| flags.contains(&"UP".into()));
    if !is_up {
        return Err(format!("it is down; 'ip link set {name} up' brings it up"));
    }
    link.get("mtu").and_then(Value::as_u64).ok_or_else(|| "'ip' does not show its MTU".to_owned())
}

/// Whether a QEMU that this process starts may make tap interfaces.
fn may_make_taps() -> std::result::Result<(), String> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !passes_net_admin_on(&status, rustix::process::geteuid().is_root()) {
        return Err(
            "that needs the capability CAP_NET_ADMIN; run the daemon as root, or use the network 'user'"
                .to_owned(),
        );
    }
    match std::fs::File::options().read(true).write(true).open(TUN_DEVICE) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(format!(
            "there is no {TUN_DEVICE}; 'modprobe tun' loads the driver, and a container must be given the device"
        )),
        Err(error) => Err(format!("{TUN_DEVICE} cannot be opened: {error}")),
    }
}

/// A program that root starts has root's capabilities. A program of another user has only the ambient ones.
fn passes_net_admin_on(status: &str, is_root: bool) -> bool {
    let field = if is_root { "CapEff:" } else { "CapAmb:" };
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    let bits = value.and_then(|value| u64::from_str_radix(value.trim(), 16).ok()).unwrap_or(0);
    bits >> CAP_NET_ADMIN & 1 == 1
}

async fn ip(bridge: &str, arguments: &[&str]) -> Result<Output> {
    let failed = |reason: String| Error::Bridge { bridge: bridge.to_owned(), reason };
    let mut command = launch::program(&find_ip()?);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(IP_TIMEOUT, command.output()).await {
        Ok(output) => output.map_err(|error| failed(format!("'ip' cannot be run: {error}"))),
        Err(_) => Err(failed(format!("'ip' did not end within {} s", IP_TIMEOUT.as_secs()))),
    }
}

/// `ip` is often in a directory that is not in the `PATH` of ordinary users.
fn find_ip() -> Result<PathBuf> {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    binary::find_in("ip", "package iproute2", &path)
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.trim().replace('\n', "; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_has_a_name_that_linux_takes() {
        let uuid = Uuid::from_u128(0x0123_4567_89ab_4def_8123_4567_89ab_cdef);
        assert_eq!(tap_name(uuid), "hw0123456789ab4");
    }

    #[test]
    fn only_a_bridge_that_is_up_is_accepted() {
        let of = |text: &str| parse("br0", text.as_bytes());
        assert_eq!(of(r#"[{"flags":["UP"],"mtu":9000,"linkinfo":{"info_kind":"bridge"}}]"#), Ok(9000));
        let down = of(r#"[{"flags":["BROADCAST"],"mtu":1500,"linkinfo":{"info_kind":"bridge"}}]"#);
        assert!(down.unwrap_err().contains("ip link set br0 up"));
        for other in
            [r#"[{"flags":["UP"],"mtu":1500}]"#, r#"[{"flags":["UP"],"linkinfo":{"info_kind":"tun"}}]"#]
        {
            assert!(of(other).unwrap_err().contains("not a bridge"));
        }
        for odd in ["", "[]", "{}"] {
            assert!(of(odd).is_err());
        }
    }

    #[test]
    fn capabilities_are_those_that_a_child_has() {
        let status = "Name:\tx\nCapEff:\t0000000000001000\nCapAmb:\t0000000000000000\n";
        assert!(passes_net_admin_on(status, true) && !passes_net_admin_on(status, false));
        let ambient = "CapEff:\t0000000000000000\nCapAmb:\t0000000000001000\n";
        assert!(passes_net_admin_on(ambient, false) && !passes_net_admin_on(ambient, true));
        assert!(!passes_net_admin_on("", true));
    }
}
