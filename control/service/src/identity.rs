//! The identity of a machine: UUID, MAC address, machine-id and SSH host key. It is made when the machine is created.

use headwater_api::Identity;
use headwater_db::Secret;
use ssh_key::private::{Ed25519Keypair, KeypairData};
use ssh_key::{LineEnding, PrivateKey};
use uuid::Uuid;

use crate::backend::Random;

/// A new machine's identity.
#[derive(Debug)]
pub(crate) struct NewIdentity {
    pub(crate) uuid: Uuid,
    pub(crate) mac: String,
    pub(crate) identity: Identity,
    pub(crate) ssh_host_key_private: Secret,
}

/// Why an identity could not be made.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// No random numbers.
    #[error("cannot get random numbers from the system")]
    Random(#[source] std::io::Error),
    /// The key could not be encoded.
    #[error("cannot write an SSH host key")]
    Key(#[source] ssh_key::Error),
}

/// Makes an identity from random bytes.
pub(crate) fn make(
    random: &dyn Random,
    host_name: &str,
    user_data: Option<String>,
) -> Result<NewIdentity, IdentityError> {
    let mut uuid_bytes = [0; 16];
    random.fill(&mut uuid_bytes).map_err(IdentityError::Random)?;
    let uuid = uuid::Builder::from_random_bytes(uuid_bytes).into_uuid();
    let (ssh_host_key_public, ssh_host_key_private) = new_host_key(random, host_name)?;
    Ok(NewIdentity {
        uuid,
        mac: mac_of(uuid),
        identity: Identity {
            host_name: host_name.to_owned(),
            // The value that systemd would derive from the UUID in a guest without one, so it stays the same when the seed
            // disk is read.
            machine_id: uuid.simple().to_string(),
            ssh_host_key_public,
            address: None,
            user_data,
            personality: std::collections::BTreeMap::new(),
        },
        ssh_host_key_private,
    })
}

/// Makes an SSH host key: public and private half.
pub(crate) fn new_host_key(random: &dyn Random, host_name: &str) -> Result<(String, Secret), IdentityError> {
    let mut seed = [0; 32];
    random.fill(&mut seed).map_err(IdentityError::Random)?;
    let pair = KeypairData::from(Ed25519Keypair::from_seed(&seed));
    let key = PrivateKey::new(pair, format!("root@{host_name}")).map_err(IdentityError::Key)?;
    let private = key.to_openssh(LineEnding::LF).map_err(IdentityError::Key)?.to_string();
    Ok((key.public_key().to_openssh().map_err(IdentityError::Key)?, Secret::new(private)))
}

/// The MAC address that belongs to a UUID: QEMU's prefix, then bytes of the UUID that are random in version 4.
pub(crate) fn mac_of(uuid: Uuid) -> String {
    let [.., a, b, c] = *uuid.as_bytes();
    format!("52:54:00:{a:02x}:{b:02x}:{c:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::SystemRandom;

    #[test]
    fn an_identity_is_complete_and_its_own() {
        let one = make(&SystemRandom, "web-1", None).unwrap();
        let two = make(&SystemRandom, "web-1", None).unwrap();
        assert_ne!(one.uuid, two.uuid);
        assert_ne!(one.identity.machine_id, two.identity.machine_id);
        assert_ne!(one.identity.ssh_host_key_public, two.identity.ssh_host_key_public);
        assert!(one.identity.ssh_host_key_public.starts_with("ssh-ed25519 "));
        assert_eq!(one.identity.machine_id, one.uuid.simple().to_string());
        assert_eq!(one.mac, mac_of(one.uuid));
        let key = PrivateKey::from_openssh(one.ssh_host_key_private.reveal()).unwrap();
        assert_eq!(key.public_key().to_openssh().unwrap(), one.identity.ssh_host_key_public);
    }
}
