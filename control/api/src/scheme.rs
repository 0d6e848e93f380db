//! Schemes: the versioned settings of the machines of a catalog. (A cloud scheme of the crate headwater-sizes is
//! something else: it describes how virtual machines are created in Azure.)
//!
//! A change of the settings of a catalog makes a new version. A machine has the settings of one version until it
//! boots, and then takes those of the newest one. A setting that was changed for the machine alone stays
//! ([`SchemeSettings::merged`]).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::{CacheSettings, DiskTransport};
use crate::platform::{Display, Firmware, Network, Platform};

/// How many versions of a scheme are kept; older versions are kept while a machine has them.
pub const KEPT_SCHEMES: u32 = 100;

/// The settings that the machines of a catalog have alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchemeSettings {
    /// Their write caches.
    pub cache: CacheSettings,
    /// Their guests' memory.
    pub memory_bytes: u64,
    /// Their guests' processors.
    pub cpus: u32,
    /// How they reach their disks.
    pub transport: DiskTransport,
    /// What they boot with.
    pub firmware: Firmware,
    /// Whether their firmware runs only loaders that are signed with Microsoft's keys.
    pub secure_boot: bool,
    /// Whether each has a TPM 2.0.
    pub tpm: bool,
    /// What shows their screens.
    pub display: Display,
    /// How their network cards are connected: `user` or `bridge:NAME`.
    #[schema(value_type = String)]
    pub network: Network,
    /// Size of their scratch disks; 0: none.
    pub scratch_bytes: u64,
    /// Their cloud-init user data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
}

/// New settings for the machines of a catalog; what is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetScheme {
    /// Their write caches. Whether they are persistent stays, and so does the mode of persistent caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheSettings>,
    /// Their guests' memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Their guests' processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// How they reach their disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<DiskTransport>,
    /// What they boot with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Firmware>,
    /// Whether their firmware runs only loaders that are signed with Microsoft's keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure_boot: Option<bool>,
    /// Whether each has a TPM 2.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<bool>,
    /// What shows their screens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display: Option<Display>,
    /// How their network cards are connected: `user` or `bridge:NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub network: Option<Network>,
    /// Size of their scratch disks; 0: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_bytes: Option<u64>,
    /// Their cloud-init user data; an empty text removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data: Option<String>,
}

impl SetScheme {
    /// The settings after the change.
    pub fn of(&self, before: &SchemeSettings) -> SchemeSettings {
        let user_data = match self.user_data.as_deref() {
            None => before.user_data.clone(),
            Some("") => None,
            Some(text) => Some(text.to_owned()),
        };
        SchemeSettings {
            cache: self.cache.unwrap_or(before.cache),
            memory_bytes: self.memory_bytes.unwrap_or(before.memory_bytes),
            cpus: self.cpus.unwrap_or(before.cpus),
            transport: self.transport.unwrap_or(before.transport),
            firmware: self.firmware.unwrap_or(before.firmware),
            secure_boot: self.secure_boot.unwrap_or(before.secure_boot),
            tpm: self.tpm.unwrap_or(before.tpm),
            display: self.display.unwrap_or(before.display),
            network: self.network.clone().unwrap_or_else(|| before.network.clone()),
            scratch_bytes: self.scratch_bytes.unwrap_or(before.scratch_bytes),
            user_data,
        }
    }
}

/// The newer value, unless the machine's own value was changed.
fn merge<T: PartialEq>(own: T, base: &T, newer: T) -> T {
    if own == *base { newer } else { own }
}

impl SchemeSettings {
    /// Settings of a machine on the default platform, without user data.
    pub fn new(cache: CacheSettings, memory_bytes: u64, cpus: u32, transport: DiskTransport) -> Self {
        let Platform { firmware, secure_boot, tpm, display, network, scratch_bytes } = Platform::default();
        Self {
            cache,
            memory_bytes,
            cpus,
            transport,
            firmware,
            secure_boot,
            tpm,
            display,
            network,
            scratch_bytes,
            user_data: None,
        }
    }

    /// The same on another platform.
    #[must_use]
    pub fn on(self, platform: &Platform) -> Self {
        let Platform { firmware, secure_boot, tpm, display, network, scratch_bytes } = platform.clone();
        Self { firmware, secure_boot, tpm, display, network, scratch_bytes, ..self }
    }

    /// The same with other user data.
    #[must_use]
    pub fn with_user_data(self, user_data: Option<String>) -> Self {
        Self { user_data, ..self }
    }

    /// Their platform.
    pub fn platform(&self) -> Platform {
        Platform {
            firmware: self.firmware,
            secure_boot: self.secure_boot,
            tpm: self.tpm,
            display: self.display,
            network: self.network.clone(),
            scratch_bytes: self.scratch_bytes,
        }
    }

    /// The settings of a machine that takes a newer version: `self` are its own, `base` those of the version that it had. A setting that
    /// differs from `base` was changed for this machine, and stays. Firmware and Secure Boot are one setting, because Secure Boot is a part
    /// of UEFI.
    #[must_use]
    pub fn merged(self, base: &Self, newer: Self) -> Self {
        let cache = CacheSettings {
            mode: merge(self.cache.mode, &base.cache.mode, newer.cache.mode),
            ram_bytes: merge(self.cache.ram_bytes, &base.cache.ram_bytes, newer.cache.ram_bytes),
            disk_bytes: merge(self.cache.disk_bytes, &base.cache.disk_bytes, newer.cache.disk_bytes),
            weight: merge(self.cache.weight, &base.cache.weight, newer.cache.weight),
            persistent: self.cache.persistent,
        };
        let base_firmware = (base.firmware, base.secure_boot);
        let (firmware, secure_boot) =
            merge((self.firmware, self.secure_boot), &base_firmware, (newer.firmware, newer.secure_boot));
        Self {
            cache,
            memory_bytes: merge(self.memory_bytes, &base.memory_bytes, newer.memory_bytes),
            cpus: merge(self.cpus, &base.cpus, newer.cpus),
            transport: merge(self.transport, &base.transport, newer.transport),
            firmware,
            secure_boot,
            tpm: merge(self.tpm, &base.tpm, newer.tpm),
            display: merge(self.display, &base.display, newer.display),
            network: merge(self.network, &base.network, newer.network),
            scratch_bytes: merge(self.scratch_bytes, &base.scratch_bytes, newer.scratch_bytes),
            user_data: merge(self.user_data, &base.user_data, newer.user_data),
        }
    }

    /// The settings by name, without user data.
    fn values(&self) -> [(&'static str, String); 13] {
        [
            ("cache", self.cache.mode.name().to_owned()),
            ("ram_bytes", self.cache.ram_bytes.to_string()),
            ("disk_bytes", self.cache.disk_bytes.to_string()),
            ("weight", self.cache.weight.to_string()),
            ("memory_bytes", self.memory_bytes.to_string()),
            ("cpus", self.cpus.to_string()),
            ("transport", self.transport.name().to_owned()),
            ("firmware", self.firmware.name().to_owned()),
            ("secure_boot", self.secure_boot.to_string()),
            ("tpm", self.tpm.to_string()),
            ("display", self.display.name().to_owned()),
            ("network", self.network.to_string()),
            ("scratch_bytes", self.scratch_bytes.to_string()),
        ]
    }

    /// Each setting that differs in `after`. User data may hold passwords: only its presence is shown.
    pub fn differences(&self, after: &Self) -> Vec<SchemeDifference> {
        let pairs = self.values().into_iter().zip(after.values());
        let differing = pairs.filter(|((_, before), (_, after))| before != after);
        let mut found: Vec<_> = differing
            .map(|((setting, before), (_, after))| SchemeDifference {
                setting: setting.to_owned(),
                before,
                after,
            })
            .collect();
        if self.user_data != after.user_data {
            let (before, after) = match (&self.user_data, &after.user_data) {
                (None, _) => ("none", "given"),
                (_, None) => ("given", "none"),
                _ => ("given", "other"),
            };
            let (before, after) = (before.to_owned(), after.to_owned());
            found.push(SchemeDifference { setting: "user_data".to_owned(), before, after });
        }
        found
    }
}

/// A setting that differs between two versions of a scheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchemeDifference {
    /// Its name.
    pub setting: String,
    /// Its value in the first version.
    pub before: String,
    /// Its value in the second version.
    pub after: String,
}

impl std::fmt::Display for SchemeDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} -> {}", self.setting, self.before, self.after)
    }
}

/// A version of the scheme of a catalog, which is the settings of its machines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchemeVersion {
    /// Its number.
    pub version: u32,
    /// Who made it.
    pub created_by: String,
    /// When.
    pub created_at_ms: u64,
    /// Its settings.
    pub settings: SchemeSettings,
    /// The names of machines that have them.
    pub machines: Vec<String>,
}

/// The versions of the scheme of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SchemeList {
    /// Newest first. Machines take the first one when the controller next starts them.
    pub versions: Vec<SchemeVersion>,
}

/// A version of a scheme to go back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevertScheme {
    /// Its number. Its settings become a new version.
    pub version: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> SchemeSettings {
        SchemeSettings::new(CacheSettings::default(), 1 << 29, 1, DiskTransport::default())
            .with_user_data(Some("#cloud-config\npassword: hunter2\n".to_owned()))
    }

    #[test]
    fn a_machine_keeps_what_was_changed_for_it_alone() {
        let base = settings();
        let cache = CacheSettings { ram_bytes: 128 << 20, ..base.cache };
        let change = SetScheme {
            cpus: Some(4),
            memory_bytes: Some(1 << 30),
            cache: Some(cache),
            ..SetScheme::default()
        };
        let newer = change.of(&base);
        assert_eq!(base.clone().merged(&base, newer.clone()), newer);
        let own = SchemeSettings {
            memory_bytes: 1 << 31,
            cache: CacheSettings { weight: 7, ..base.cache },
            ..base.clone()
        };
        let merged = own.merged(&base, newer);
        assert_eq!((merged.memory_bytes, merged.cpus), (1 << 31, 4));
        assert_eq!((merged.cache.ram_bytes, merged.cache.weight), (128 << 20, 7));
    }

    #[test]
    fn own_firmware_keeps_its_own_secure_boot() {
        let base = SchemeSettings { firmware: Firmware::Uefi, ..settings() };
        let newer = SchemeSettings { secure_boot: true, tpm: true, ..base.clone() };
        let merged = settings().merged(&base, newer.clone());
        assert_eq!((merged.firmware, merged.secure_boot, merged.tpm), (Firmware::Bios, false, true));
        assert_eq!(merged.platform().check(), Ok(()));
        assert_eq!(base.clone().merged(&base, newer.clone()), newer);
    }

    #[test]
    fn differences_name_settings_and_no_user_data() {
        let base = settings();
        assert!(base.differences(&base).is_empty());
        let other =
            SetScheme { user_data: Some("#!/bin/sh\n".to_owned()), cpus: Some(2), ..SetScheme::default() };
        let words: Vec<_> = base.differences(&other.of(&base)).iter().map(ToString::to_string).collect();
        assert_eq!(words, ["cpus 1 -> 2", "user_data given -> other"]);
        let none = SetScheme { user_data: Some(String::new()), ..SetScheme::default() };
        assert_eq!(base.differences(&none.of(&base))[0].to_string(), "user_data given -> none");
    }
}
