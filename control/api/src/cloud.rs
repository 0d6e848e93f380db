//! Machines in a cloud: how those of a catalog are created there, and where one of them is. Only types of requests and
//! answers: `control/service` decides, and the program sends requests to the cloud.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::{Problem, ProblemKind};

/// The longest user data of a machine in a cloud.
pub const MAX_CLOUD_USER_DATA_BYTES: usize = 48 << 10;

/// The longest text of a setting of a cloud scheme.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// How the machines of a catalog are created in a cloud. It is set when the catalog is created, and stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloudScheme {
    /// The connection whose resource group the machines are in.
    pub connection: String,
    /// The size, such as `Standard_D8ds_v5`.
    pub size: String,
    /// Sizes that are tried in this order if the cloud has no machine of `size`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backup_sizes: Vec<String>,
    /// Whether the OS disk is on the host if `places` permits it, and then lost with the host.
    #[serde(default)]
    pub ephemeral: bool,
    /// The allowed places of the OS disk, in order of preference: `cache`, `temp`, `nvme`, `managed`. By default, all of
    /// them if `ephemeral`, else `managed`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<String>,
    /// Whether the whole image is copied to the host. Needs `ephemeral`.
    #[serde(default)]
    pub full_copy: bool,
    /// The zones in which machines are created: 1, 2, 3. Empty: the region chooses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<u8>,
    /// The size of the OS disk, in whole GiB. Default: that of the version, rounded up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os_disk_bytes: Option<u64>,
    /// The identifier of the subnet.
    pub subnet: String,
    /// The identifier of the network security group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_group: Option<String>,
    /// The user with administrator rights in each guest.
    #[serde(default = "CloudScheme::default_admin_user")]
    pub admin_user: String,
    /// The public SSH key of that user.
    pub ssh_key: String,
}

impl CloudScheme {
    /// `headwater`.
    pub fn default_admin_user() -> String {
        "headwater".to_owned()
    }

    /// Fails for settings that no cloud can have. Sizes and places are checked by the cloud.
    pub fn check(&self) -> Result<(), Problem> {
        let Self { size, subnet, security_group, admin_user, ssh_key, backup_sizes, places, .. } = self;
        let wrong = |message: String, advice: &str| {
            Err(Problem::new(ProblemKind::Invalid, message).advise(advice.to_owned()))
        };
        let texts = [size, subnet, admin_user, ssh_key].into_iter().chain(security_group);
        let mut texts = texts.chain(backup_sizes).chain(places);
        if let Some(text) = texts.find(|text| text.len() > MAX_TEXT_BYTES || text.contains(char::is_control))
        {
            let start: String = text.chars().take(40).collect();
            let message = format!("value '{}..' is too long or has control characters", start.escape_debug());
            return wrong(message, "correct this setting of the cloud");
        }
        for id in std::iter::once(subnet).chain(security_group) {
            if !id.starts_with("/subscriptions/") {
                let message = format!("'{id}' is not the identifier of a resource in Azure");
                return wrong(message, "'az network vnet subnet show .. --query id' prints that of a subnet");
            }
        }
        let is_in_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        let is_first = |c: char| c.is_ascii_lowercase();
        let is_name = (1..=32).contains(&admin_user.len())
            && admin_user.chars().all(is_in_name)
            && admin_user.starts_with(is_first);
        if !is_name || matches!(admin_user.as_str(), "root" | "admin" | "administrator") {
            let message = format!("'{admin_user}' cannot be the user with administrator rights");
            return wrong(message, "use 1 to 32 of a-z, 0-9, '-' and '_', but not root or admin");
        }
        // Azure accepts no others.
        if !["ssh-rsa ", "ssh-ed25519 "].iter().any(|start| ssh_key.starts_with(start)) {
            return wrong(
                "the SSH key is not a public key of the kind ssh-rsa or ssh-ed25519".to_owned(),
                "use a public key such as the one in ~/.ssh/id_ed25519.pub: the option --ssh-key takes the file, the API its line",
            );
        }
        Ok(())
    }

    /// As text in the database.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the output of [`CloudScheme::to_text`].
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

/// A machine in a cloud as it was last created there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloudMachine {
    /// Its size, which may be a backup size.
    pub size: String,
    /// Its zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The place of its OS disk: `cache`, `temp`, `nvme` or `managed`.
    pub place: String,
    /// The cloud's identifier. Another identifier means a new machine with a pristine OS disk.
    pub vm_id: String,
}

impl CloudMachine {
    /// As text in the database.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the output of [`CloudMachine::to_text`].
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

impl std::fmt::Display for CloudMachine {
    /// As text: `Standard_D8ds_v5 in zone 2, OS disk: temp`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.size)?;
        if let Some(zone) = &self.zone {
            write!(f, " in zone {zone}")?;
        }
        write!(f, ", OS disk: {}", self.place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme() -> CloudScheme {
        let text = r#"{"connection":"prod","size":"Standard_D8ds_v5","subnet":"/subscriptions/s/x","ssh_key":"ssh-ed25519 AAAA a@b"}"#;
        CloudScheme::parse(text).unwrap()
    }

    #[test]
    fn settings_that_no_cloud_can_have_are_refused() {
        assert!(scheme().check().is_ok());
        assert_eq!(CloudScheme::parse(&scheme().to_text()), Some(scheme()));
        let refused = |change: fn(&mut CloudScheme), part: &str| {
            let mut changed = scheme();
            change(&mut changed);
            let problem = changed.check().unwrap_err();
            assert!(problem.message.contains(part) && problem.advice.is_some(), "{problem}");
        };
        refused(|it| it.subnet = "default".to_owned(), "'default' is not the identifier of a resource");
        refused(|it| it.security_group = Some("open".to_owned()), "'open' is not the identifier");
        refused(|it| it.admin_user = "root".to_owned(), "'root' cannot be the user");
        refused(|it| it.admin_user = "Anna".to_owned(), "'Anna' cannot be the user");
        refused(|it| it.ssh_key = "-----BEGIN OPENSSH PRIVATE KEY-----".to_owned(), "not a public key");
        refused(|it| it.ssh_key = "ecdsa-sha2-nistp256 AAAA a@b".to_owned(), "ssh-rsa or ssh-ed25519");
        refused(|it| it.size = "x".repeat(5000), "is too long");
        refused(|it| it.ssh_key.push('\n'), "control characters");
    }

    #[test]
    fn a_machine_is_shown_with_its_place() {
        let machine = CloudMachine {
            size: "Standard_D8ds_v5".to_owned(),
            zone: Some("2".to_owned()),
            place: "temp".to_owned(),
            vm_id: "v".to_owned(),
        };
        assert_eq!(machine.to_string(), "Standard_D8ds_v5 in zone 2, OS disk: temp");
        assert_eq!(CloudMachine::parse(&machine.to_text()), Some(machine));
    }
}
