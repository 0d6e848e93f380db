//! Targets: machines that boot from the network. They are looked up by their MAC address when their firmware asks.

use headwater_api::{BootFrom, Identity, ImageVersion, Problem};
use headwater_db::MachineRecord;

use crate::Service;
use crate::answer::problem;
use crate::caller::Caller;
use crate::lifecycle::LifecycleError;

/// What a target boots.
#[derive(Clone, Debug)]
pub struct TargetBoot {
    /// The machine's name.
    pub machine: String,
    /// The version.
    pub version: ImageVersion,
    /// The identity of the machine.
    pub identity: Identity,
    /// The most memory of its write cache.
    pub cache_ram_bytes: u64,
}

impl Service {
    /// The name of the machine with this network card, if it boots from the network. `mac` is in lower case with colons.
    pub async fn target(&self, mac: &str) -> Result<Option<String>, Problem> {
        let record = self.target_record(mac).await.map_err(|e| problem(&e))?;
        Ok(record.map(|record| record.name))
    }

    /// What the machine with this card boots now.
    pub async fn target_boot(&self, mac: &str) -> Result<Option<TargetBoot>, Problem> {
        let boot = async {
            let Some(record) = self.target_record(mac).await? else { return Ok(None) };
            let version = self.version_of("boot", &record, record.reference()).await?;
            Ok(Some(TargetBoot {
                machine: record.name,
                version,
                identity: record.identity,
                cache_ram_bytes: record.cache.ram_bytes,
            }))
        };
        boot.await.map_err(|e: LifecycleError| problem(&e))
    }

    /// Records that the machine with this card boots a version.
    pub async fn target_boots(&self, mac: &str, version: &str) -> Result<(), Problem> {
        let note = async {
            let Some(found) = self.target_record(mac).await? else { return Ok(()) };
            let (_turn, mut record) = self.turn_of(&found.name).await?;
            record.version = Some(version.to_owned());
            record.reason = None;
            record.started_at_ms = Some(self.now_ms());
            self.save(&record, &Caller::daemon(), "boots", format!("{version}, from the network")).await
        };
        note.await.map_err(|e: LifecycleError| problem(&e))
    }

    /// Records that the machine with this card asked for its boot, and why it gets none.
    pub async fn target_refused(&self, mac: &str, why: &str) -> Result<(), Problem> {
        let note = async {
            let Some(found) = self.target_record(mac).await? else { return Ok(()) };
            let (_turn, mut record) = self.turn_of(&found.name).await?;
            record.reason = Some(format!("it cannot boot: {why}"));
            self.save(&record, &Caller::daemon(), "cannot boot", why.to_owned()).await
        };
        note.await.map_err(|e: LifecycleError| problem(&e))
    }

    async fn target_record(&self, mac: &str) -> Result<Option<MachineRecord>, LifecycleError> {
        let record = self.db().read().await?.machines().by_mac(mac).await?;
        Ok(record.filter(|record| record.boot == BootFrom::Network))
    }
}
