//! The seed disk: a small read-only disk that gives a guest its identity, in the NoCloud format of cloud-init.
//!
//! It is a FAT file system with the label `CIDATA`, so cloud-init finds it by itself and anything else
//! can mount it. It holds:
//!
//! | file | read by | contents |
//! |---|---|---|
//! | `meta-data` | cloud-init | instance id, host name, personality strings |
//! | `vendor-data` | cloud-init | `#cloud-config` with the machine-id and the SSH host keys |
//! | `user-data` | cloud-init and others | the user's data, byte for byte; else an empty `#cloud-config` |
//! | `network-config` | cloud-init | DHCP or the fixed IP address on the card with the machine's MAC address, if it has a card |
//! | `card.network` | others | the fixed IP address, if there is one, as a file of systemd-networkd |
//! | `hostname`, `machine-id` | others | one line each |
//! | `personality` | others | the personality strings, if there are any: a line `NAME=VALUE` for each |
//! | `ssh_host_TYPE_key`, `.pub` | others | the SSH host keys |
//!
//! The identity is in vendor-data so that user data needs no merging and can be any kind that cloud-init
//! knows. If both set the same value, cloud-init prefers the user's. Equal identities give equal disks.

mod fat;
mod identity;

use std::path::Path;

use serde_json::{Map, Value, json};

pub use identity::{CardAddress, Identity, MAX_USER_DATA_BYTES, SshHostKey};

use crate::error::{Error, Result};
use crate::spec::{MacAddress, Network};

/// Label of the file system, by which cloud-init finds the disk.
pub const LABEL: &str = "CIDATA";

/// Writes the seed disk of a machine to `path`. Only its owner may read the file: it holds private keys.
pub fn write(path: &Path, identity: &Identity, network: &Network, mac: MacAddress) -> Result<()> {
    identity.check()?;
    let files = files(identity, network, mac);
    let image = fat::image(LABEL, identity.volume_id(), &files).ok_or_else(|| Error::Spec {
        machine: identity.hostname.clone(),
        reason: "its identity and user data do not fit on a seed disk".into(),
    })?;
    let describe = || Error::io("write the seed disk", path);
    // An earlier seed disk may be open in a QEMU that is about to end, so its content is not changed.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(describe()(error)),
        _ => {}
    }
    let mut options = std::fs::File::options();
    options.write(true).create_new(true);
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(path).and_then(|mut file| std::io::Write::write_all(&mut file, &image));
    if written.is_err() {
        // A partial seed disk is worse than none.
        let _ = std::fs::remove_file(path);
    }
    written.map_err(describe())
}

/// Names and contents of the files.
fn files(identity: &Identity, network: &Network, mac: MacAddress) -> Vec<(String, Vec<u8>)> {
    let text = |name: &str, content: String| (name.to_owned(), content.into_bytes());
    // YAML contains JSON, so there is nothing to quote by hand.
    let mut meta = json!({ "instance-id": identity.instance_id, "local-hostname": identity.hostname });
    if !identity.personality.is_empty() {
        meta["personality"] = json!(identity.personality);
    }
    let vendor = vendor_data(identity);
    let empty_user_data = b"#cloud-config\n{}\n";
    let mut files = vec![
        text("meta-data", format!("{meta}\n")),
        text("vendor-data", format!("#cloud-config\n{vendor}\n")),
        ("user-data".to_owned(), identity.user_data.clone().unwrap_or_else(|| empty_user_data.to_vec())),
        text("hostname", format!("{}\n", identity.kernel_name())),
        text("machine-id", format!("{}\n", identity.machine_id)),
    ];
    if !identity.personality.is_empty() {
        let lines = identity.personality.iter().map(|(name, value)| format!("{name}={value}\n"));
        files.push(text("personality", lines.collect()));
    }
    if *network != Network::None {
        // QEMU's own network has addresses of its own.
        let address = identity.address.as_ref().filter(|_| matches!(network, Network::Bridge(_)));
        let card = address.map_or_else(|| json!({ "dhcp4": true }), card_config);
        let mut config = json!({ "version": 2, "ethernets": { "net0": card } });
        config["ethernets"]["net0"]["match"] = json!({ "macaddress": mac.to_string() });
        files.push(text("network-config", format!("{config}\n")));
        files.extend(address.map(|address| text("card.network", networkd_file(address, mac))));
    }
    for key in &identity.ssh_host_keys {
        files.push(text(&format!("ssh_host_{}_key", key.kind), key.private.clone()));
        files.push(text(&format!("ssh_host_{}_key.pub", key.kind), key.public.clone()));
    }
    files
}

/// A fixed address as cloud-init and netplan read it.
fn card_config(address: &CardAddress) -> Value {
    let CardAddress { ip, prefix, gateway, dns } = address;
    let mut card = json!({ "dhcp4": false, "addresses": [format!("{ip}/{prefix}")] });
    if let Some(gateway) = gateway {
        // Old versions of cloud-init do not know `default`.
        card["routes"] = json!([{ "to": "0.0.0.0/0", "via": gateway }]);
    }
    if !dns.is_empty() {
        card["nameservers"] = json!({ "addresses": dns });
    }
    card
}

/// A fixed address as systemd-networkd reads it.
fn networkd_file(address: &CardAddress, mac: MacAddress) -> String {
    let CardAddress { ip, prefix, gateway, dns } = address;
    let gateway = gateway.iter().map(|gateway| format!("Gateway={gateway}\n"));
    let more: String = gateway.chain(dns.iter().map(|dns| format!("DNS={dns}\n"))).collect();
    format!("[Match]\nMACAddress={mac}\n\n[Network]\nAddress={ip}/{prefix}\n{more}")
}

fn vendor_data(identity: &Identity) -> Value {
    let id = &identity.machine_id;
    // Checked to be hexadecimal, so it needs no quoting in the shell.
    let set_machine_id = format!(
        "[ \"$(cat /etc/machine-id 2>/dev/null)\" = {id} ] || {{ echo {id} >/etc/machine-id; chmod 444 /etc/machine-id; }}"
    );
    let mut config = Map::new();
    config.insert("bootcmd".into(), json!([["sh", "-c", set_machine_id]]));
    if !identity.ssh_host_keys.is_empty() {
        let mut keys = Map::new();
        for key in &identity.ssh_host_keys {
            keys.insert(format!("{}_private", key.kind), key.private.clone().into());
            keys.insert(format!("{}_public", key.kind), key.public.clone().into());
        }
        config.insert("ssh_deletekeys".into(), true.into());
        config.insert("ssh_keys".into(), Value::Object(keys));
    }
    Value::Object(config)
}
