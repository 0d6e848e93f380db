//! The identity of a machine, as its guest sees it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{Error, Result};

/// The longest user data, in bytes.
pub const MAX_USER_DATA_BYTES: usize = 4 << 20;

/// The longest host name, with its dots.
const MAX_HOST_NAME_BYTES: usize = 253;

/// The longest host name of a Linux kernel.
const MAX_KERNEL_NAME_BYTES: usize = 64;

/// How user data that cloud-init understands may start.
const USER_DATA_STARTS: [&[u8]; 9] = [
    b"#!",
    b"#cloud-config",
    b"#cloud-boothook",
    b"#include",
    b"#part-handler",
    b"## template: jinja",
    b"Content-Type:",
    b"MIME-Version:",
    // gzip
    b"\x1f\x8b",
];

/// An SSH host key, in the form that OpenSSH keeps in files.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshHostKey {
    /// Its type as in the name of the file: `ed25519`, `rsa`, `ecdsa`.
    pub kind: String,
    /// Content of the file `ssh_host_TYPE_key`.
    pub private: String,
    /// Content of the file `ssh_host_TYPE_key.pub`.
    pub public: String,
}

/// Without the private part.
impl std::fmt::Debug for SshHostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SshHostKey").field("public", &self.public).finish_non_exhaustive()
    }
}

/// A fixed IPv4 address of the network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardAddress {
    /// The address.
    pub ip: Ipv4Addr,
    /// The length of the network's prefix.
    pub prefix: u8,
    /// The router of the network.
    pub gateway: Option<Ipv4Addr>,
    /// The DNS servers.
    pub dns: Vec<Ipv4Addr>,
}

/// The identity that the seed disk gives to a guest.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its host name: letters, digits and hyphens, and dots between its parts.
    pub hostname: String,
    /// cloud-init repeats the setup of a guest if this value changes.
    pub instance_id: String,
    /// 32 hexadecimal digits, for `/etc/machine-id`.
    pub machine_id: String,
    /// At most one of each type.
    pub ssh_host_keys: Vec<SshHostKey>,
    /// The address of its network card, if the card is on a bridge. `None`: the guest asks a DHCP server.
    pub address: Option<CardAddress>,
    /// The user data: a script (`#!`) or any other format that cloud-init accepts.
    pub user_data: Option<Vec<u8>>,
    /// Strings for programs in the guest, by name. No name has `=`, and none has a line break.
    pub personality: BTreeMap<String, String>,
}

/// Whether a text is a part of a host name.
fn is_label(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(is_plain)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

impl Identity {
    /// The name for the kernel: the whole host name, or its first part if the whole is too long for a kernel.
    pub(super) fn kernel_name(&self) -> &str {
        let first = || self.hostname.split('.').next().unwrap_or_default();
        if self.hostname.len() <= MAX_KERNEL_NAME_BYTES { &self.hostname } else { first() }
    }

    /// The identity that belongs to a UUID, without SSH host keys: the guest makes its own. The machine-id
    /// is the UUID, which is also what systemd derives from the firmware under KVM.
    pub fn new(hostname: &str, uuid: Uuid) -> Self {
        Self {
            hostname: hostname.to_owned(),
            instance_id: uuid.to_string(),
            machine_id: uuid.simple().to_string(),
            ssh_host_keys: Vec::new(),
            address: None,
            user_data: None,
            personality: BTreeMap::new(),
        }
    }

    /// Checks whether a guest can use the identity; the error names the fault.
    pub fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(Error::Spec { machine: self.hostname.clone(), reason });
        let name = &self.hostname;
        if name.len() > MAX_HOST_NAME_BYTES || !name.split('.').all(is_label) {
            return refuse(format!(
                "'{name}' is not a host name: it consists of parts of 1 to 63 letters, digits and hyphens, without a hyphen at their ends, and dots between \
                 them, {MAX_HOST_NAME_BYTES} characters at most"
            ));
        }
        if self.machine_id.len() != 32 || !self.machine_id.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
        {
            return refuse(format!(
                "the machine-id '{}' is not 32 lower-case hexadecimal digits",
                self.machine_id
            ));
        }
        for key in &self.ssh_host_keys {
            if key.kind.is_empty() || !key.kind.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
            {
                return refuse(format!("'{}' is not a type of SSH host key, such as ed25519", key.kind));
            }
        }
        if let Some(data) = &self.user_data {
            if data.len() > MAX_USER_DATA_BYTES {
                let len = data.len();
                return refuse(format!(
                    "the user data has {len} bytes; the maximum is {MAX_USER_DATA_BYTES}"
                ));
            }
            if !USER_DATA_STARTS.iter().any(|start| data.starts_with(start)) {
                return refuse(
                    "the user data is neither a script (first line '#!...') nor anything else that cloud-init \
                     takes (first line '#cloud-config', '#include', 'Content-Type: multipart/...', ...)"
                        .into(),
                );
            }
        }
        Ok(())
    }

    /// The serial number of the seed's file system: the first digits of the machine-id.
    pub(super) fn volume_id(&self) -> u32 {
        self.machine_id.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok()).unwrap_or(0)
    }
}

/// Without the user data and the keys, which may be secret.
impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity")
            .field("hostname", &self.hostname)
            .field("instance_id", &self.instance_id)
            .field("machine_id", &self.machine_id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_no_guest_could_use_are_refused() {
        let good = Identity::new("lab-1", Uuid::from_u128(5));
        assert!(good.check().is_ok());
        let refused = |change: &dyn Fn(&mut Identity), words: &str| {
            let mut identity = good.clone();
            change(&mut identity);
            let error = identity.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        for name in ["", "-a", "a-", "a b", "a.", ".b", "a.-b", "a/b", &"x".repeat(64), &["x"; 128].join(".")]
        {
            refused(&|i| i.hostname = name.to_owned(), "host name");
        }
        let long = ["x".repeat(40), "y".repeat(40)].join(".");
        let first = "x".repeat(40);
        for (name, kernels) in [("LAB.example.com", "LAB.example.com"), (long.as_str(), first.as_str())] {
            let identity = Identity { hostname: name.to_owned(), ..good.clone() };
            assert!(identity.check().is_ok(), "{name}");
            assert_eq!(identity.kernel_name(), kernels);
        }
        refused(&|i| i.machine_id = "7".into(), "machine-id");
        refused(&|i| i.user_data = Some(b"hello".to_vec()), "neither a script");
        refused(&|i| i.user_data = Some(vec![b'#'; MAX_USER_DATA_BYTES + 1]), "bytes");
    }

    #[test]
    fn secrets_are_not_printed() {
        let mut identity = Identity::new("lab-1", Uuid::from_u128(5));
        identity.user_data = Some(b"#!secret".to_vec());
        let private = "PRIVATE".to_owned();
        identity.ssh_host_keys.push(SshHostKey { kind: "rsa".into(), private, public: "public".into() });
        let text = format!("{identity:?} {:?}", identity.ssh_host_keys);
        assert!(!text.contains("PRIVATE") && !text.contains("secret"), "{text}");
    }
}
