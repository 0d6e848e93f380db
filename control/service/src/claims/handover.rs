//! The holder of a claim gets more than the machine: its addresses, and a secret that only its guest knows too.
//!
//! Addresses are asked for as soon as a machine is ready, because a claim is not to wait for a guest. A secret is made for each claim that
//! asks for it, goes to the guest through its agent, and is in no database, log or event.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use headwater_api::Claim;
use headwater_db::DbError;
use serde_json::json;

use crate::Service;
use crate::lifecycle::Active;

/// How long a claim waits for the addresses of a machine that are not known yet.
const ADDRESSES_SOON: Duration = Duration::from_millis(100);

/// How long a guest may take to say its addresses or users.
const GUEST_PATIENCE: Duration = Duration::from_secs(5);

/// How long a guest may take to accept a secret, with what it does with it.
const SECRET_TIMEOUT: Duration = Duration::from_secs(60);

/// The letters of a secret: no two of them look alike.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// Letters of a secret: 160 bits.
const SECRET_LEN: usize = 32;

/// The script by which a guest keeps a secret for root, and hands it to its own program if it has such a program.
const ACCEPT: &str = "\
umask 077 && mkdir -p /run/headwater && cat >/run/headwater/claim.$$ && mv /run/headwater/claim.$$ /run/headwater/claim.json || exit 1
if [ -x /etc/headwater/claimed ]; then exec /etc/headwater/claimed /run/headwater/claim.json; fi";

/// The most characters of what a guest said in an error.
const SAID_CHARS: usize = 200;

impl Service {
    /// The addresses of a machine. Waits a moment for a guest that was not asked yet.
    pub(super) async fn addresses_of(&self, active: &Arc<Active>) -> Vec<IpAddr> {
        if let Some(known) = active.guest().addresses() {
            return known;
        }
        // To the end, also if nobody waits any more: the next look finds what it learnt.
        let asked = self.learn_addresses(active);
        if let Some(asked) = asked {
            let _ = tokio::time::timeout(ADDRESSES_SOON, asked).await;
        }
        active.guest().addresses().unwrap_or_default()
    }

    /// Asks a guest for its addresses, unless they are known or it was asked just now.
    pub(super) fn learn_addresses(&self, active: &Arc<Active>) -> Option<tokio::task::JoinHandle<()>> {
        if !active.guest().may_ask_addresses() {
            return None;
        }
        let active = Arc::clone(active);
        Some(tokio::spawn(async move {
            let answer = tokio::time::timeout(GUEST_PATIENCE, active.vm.addresses()).await;
            match answer {
                Ok(Ok(addresses)) => active.guest().set_addresses(addresses),
                // No agent answers there, or not yet.
                Ok(Err(_)) | Err(_) => active.guest().no_answer(),
            }
        }))
    }

    /// Looks whether somebody is logged in. Returns true once after the last user has logged off.
    pub(super) async fn has_logged_off(&self, active: &Active) -> bool {
        if !active.guest().may_ask_users() {
            return false;
        }
        match tokio::time::timeout(GUEST_PATIENCE, active.vm.users()).await {
            Ok(Ok(users)) => active.guest().saw_users(users),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Makes a secret for a claim, and gives it to the guest. The inner error says why the guest has no such secret.
    pub(super) async fn hand_over(&self, claim: &Claim) -> Result<Result<String, String>, DbError> {
        let Some(record) = self.running_claim(claim.id).await? else {
            return Ok(Err("its claim has ended".to_owned()));
        };
        let Some(active) = self.active(record.machine) else {
            return Ok(Err("it is off, or was reset just now".to_owned()));
        };
        let given = self.give_secret(claim, &active).await;
        // A guest that was reset meanwhile does not have it.
        Ok(match self.is_present(record.machine, &active) {
            true => given,
            false => Err("it was reset or switched off meanwhile".to_owned()),
        })
    }

    async fn give_secret(&self, claim: &Claim, active: &Active) -> Result<String, String> {
        let mut bytes = [0; SECRET_LEN];
        self.random().fill(&mut bytes).map_err(|e| format!("there are no random numbers: {e}"))?;
        let letter = |byte: &u8| LETTERS.get(usize::from(byte % 32)).copied().map_or('a', char::from);
        let secret: String = bytes.iter().map(letter).collect();
        let note = json!({
            "claim": claim.id,
            "for": claim.holder,
            "expires_at_ms": claim.expires_at_ms,
            "secret": secret,
        });
        let argv = ["sh", "-c", ACCEPT].map(str::to_owned);
        let done = active.vm.exec(&argv, note.to_string().into_bytes(), SECRET_TIMEOUT).await;
        let done = done.map_err(|e| e.to_string())?;
        if done.exit_code == 0 {
            return Ok(secret);
        }
        let said = String::from_utf8_lossy(&done.stderr).replace(&secret, "(secret)");
        let said: String =
            said.chars().take(SAID_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
        Err(format!("its guest did not accept it, with exit code {}: {}", done.exit_code, said.trim()))
    }
}
