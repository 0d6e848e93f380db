//! The parts of a virtual machine's hardware that its settings choose: firmware, TPM, display, network and scratch
//! disk. Only the settings: the daemon starts QEMU with them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The longest name of a network interface on Linux, in bytes.
const MAX_INTERFACE_NAME_BYTES: usize = 15;

/// The firmware of a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Firmware {
    /// SeaBIOS: it boots the boot sector of the disk.
    #[default]
    Bios,
    /// OVMF: it boots a loader from the EFI system partition of the disk.
    Uefi,
}

impl Firmware {
    /// All kinds, as written.
    pub const NAMES: [&str; 2] = ["bios", "uefi"];

    /// The firmware's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bios => "bios",
            Self::Uefi => "uefi",
        }
    }

    /// Parses the output of [`Firmware::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = [Self::Bios, Self::Uefi].into_iter().find(|firmware| firmware.name() == text);
        found.ok_or_else(|| format!("'{text}' is not a firmware; use one of {}", Self::NAMES.join(", ")))
    }
}

impl std::fmt::Display for Firmware {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The display of a virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Display {
    /// Nothing: the machine has no graphics card.
    #[default]
    None,
    /// VNC on a unix socket in the machine's directory.
    Vnc,
}

impl Display {
    /// The names of all displays.
    pub const NAMES: [&str; 2] = ["none", "vnc"];

    /// The display's name in requests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Vnc => "vnc",
        }
    }

    /// Parses the output of [`Display::name`].
    pub fn parse(text: &str) -> Result<Self, String> {
        let found = [Self::None, Self::Vnc].into_iter().find(|display| display.name() == text);
        found.ok_or_else(|| format!("'{text}' is not a display; use one of {}", Self::NAMES.join(", ")))
    }
}

impl std::fmt::Display for Display {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// How a virtual machine's network card is connected. Written as `user` or `bridge:NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    /// QEMU's user network: outgoing connections through address translation; no incoming connections.
    #[default]
    User,
    /// A port of this bridge on the host.
    Bridge(String),
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "user" => Ok(Self::User),
            Some(("bridge", name)) if is_interface_name(name) => Ok(Self::Bridge(name.to_owned())),
            Some(("bridge", name)) => Err(format!(
                "'{name}' is not the name of a bridge: it has 1 to {MAX_INTERFACE_NAME_BYTES} of a-z, A-Z, 0-9, '.', '_' and '-', \
                 and begins with a letter or a digit"
            )),
            _ => Err(format!("'{text}' is not a network; write user, or bridge:NAME such as bridge:br0")),
        }
    }
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::User => f.write_str("user"),
            Self::Bridge(name) => write!(f, "bridge:{name}"),
        }
    }
}

/// Whether the name consists of the permitted characters. Linux permits more; a name that begins with a hyphen would be an
/// option of `ip`.
fn is_interface_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    name.len() <= MAX_INTERFACE_NAME_BYTES
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_plain)
}

/// Firmware, TPM, display, network and scratch disk of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Platform {
    /// The firmware.
    pub firmware: Firmware,
    /// Whether the firmware, which is then UEFI, runs only loaders that are signed with Microsoft's keys.
    pub secure_boot: bool,
    /// Whether it has a TPM 2.0.
    pub tpm: bool,
    /// The display.
    pub display: Display,
    /// The connection of the network card.
    pub network: Network,
    /// Size of its scratch disk; 0: it has none.
    pub scratch_bytes: u64,
}

/// The sizes that a scratch disk can have.
const SCRATCH_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=4 << 40;

/// The size of a scratch disk is a multiple of this.
const SCRATCH_UNIT_BYTES: u64 = 1 << 20;

impl Platform {
    /// Fails if the combination is not possible.
    pub fn check(&self) -> Result<(), String> {
        if self.secure_boot && self.firmware != Firmware::Uefi {
            return Err("Secure Boot is a part of UEFI; give --firmware uefi as well".to_owned());
        }
        let scratch_bytes = self.scratch_bytes;
        let is_possible =
            SCRATCH_BYTES.contains(&scratch_bytes) && scratch_bytes.is_multiple_of(SCRATCH_UNIT_BYTES);
        if scratch_bytes > 0 && !is_possible {
            return Err(format!(
                "a scratch disk of {scratch_bytes} bytes is not possible; give whole MiB, from 64M to 4T"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_survive_their_names() {
        for name in Firmware::NAMES {
            assert_eq!(Firmware::parse(name).unwrap().name(), name);
            assert_eq!(serde_json::to_value(Firmware::parse(name).unwrap()).unwrap(), name);
        }
        for name in Display::NAMES {
            assert_eq!(Display::parse(name).unwrap().name(), name);
            assert_eq!(serde_json::to_value(Display::parse(name).unwrap()).unwrap(), name);
        }
        for text in ["user", "bridge:br0", "bridge:br-lab.10_a"] {
            let network: Network = text.parse().unwrap();
            assert_eq!(serde_json::to_value(&network).unwrap(), text);
            assert_eq!(serde_json::from_value::<Network>(text.into()).unwrap(), network);
        }
        assert!(Firmware::parse("efi").unwrap_err().contains("bios, uefi"));
        assert!(Display::parse("gtk").unwrap_err().contains("none, vnc"));
    }

    #[test]
    fn a_scratch_disk_has_whole_mebibytes() {
        for (scratch_bytes, is_possible) in [
            (0, true),
            (1 << 20, false),
            (64 << 20, true),
            ((64 << 20) + 512, false),
            (4 << 40, true),
            (5 << 40, false),
        ] {
            let platform = Platform { scratch_bytes, ..Platform::default() };
            assert_eq!(platform.check().is_ok(), is_possible, "{scratch_bytes}");
        }
    }

    #[test]
    fn a_bios_has_no_secure_boot() {
        for (firmware, is_possible) in [(Firmware::Bios, false), (Firmware::Uefi, true)] {
            let platform = Platform { firmware, secure_boot: true, ..Platform::default() };
            assert_eq!(platform.check().is_ok(), is_possible);
        }
    }

    #[test]
    fn names_that_no_bridge_has_are_refused() {
        for name in ["", "a-name-of-16-chrs", "-br0", "..", "br/0", "br 0", "br0,x", "br\u{e9}"] {
            let why = format!("bridge:{name}").parse::<Network>().unwrap_err();
            assert!(why.contains("is not the name of a bridge"), "{name}: {why}");
        }
        for text in ["", "br0", "nat", "tap:x", "User", "user:"] {
            let why = text.parse::<Network>().unwrap_err();
            assert!(why.contains("write user, or bridge:NAME"), "{text}: {why}");
        }
    }
}
