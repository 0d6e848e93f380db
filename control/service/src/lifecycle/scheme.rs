//! Schemes: the settings of a catalog, in numbered versions. A machine takes the newest version's settings when it boots; `start.rs`
//! calls this. The versions themselves are made in `operations/catalog_scheme.rs`.
//!
//! Its settings, the event and the number of the version are written in one transaction. Legal outcomes of a crash: neither, or all
//! three. A machine in a maintenance session boots with its earlier settings until the session ends: the variables of its firmware and
//! the state of its TPM are kept with the disk of the session.

use headwater_api::{Change, SchemeDifference, SchemeSettings};
use headwater_db::{DbError, MachineRecord, Purpose};

use crate::Service;
use crate::caller::Caller;
use crate::template::{self, Values};

/// Differences in words.
pub(crate) fn in_words(differences: &[SchemeDifference]) -> String {
    let words: Vec<_> = differences.iter().map(ToString::to_string).collect();
    if words.is_empty() { "no setting differs".to_owned() } else { words.join(", ") }
}

impl Service {
    /// Gives a machine that is off the newest settings of its catalog. A setting that was changed for it alone stays. The caller has its
    /// turn.
    pub(crate) async fn take_scheme(
        &self,
        mut record: MachineRecord,
        caller: &Caller,
    ) -> Result<MachineRecord, DbError> {
        if !record.has_old_scheme() {
            return Ok(record);
        }
        let mut repo = self.db().write().await?;
        // With its user data, and as the catalog is at this moment.
        let Some(now) = repo.machines().by_uuid(record.uuid).await? else { return Ok(record) };
        let (Some(catalog), Some(own), Some(newest)) = (&now.catalog, now.scheme, now.catalog_scheme) else {
            return Ok(record);
        };
        let disks = repo.persistent_disks().of_machine(record.uuid).await?;
        if disks.iter().any(|disk| disk.purpose == Purpose::MaintenanceSession) {
            return Ok(record);
        }
        let versions = repo.catalogs().schemes(catalog).await?;
        let version = |number| versions.iter().find(|version| version.version == number);
        let (Some(base), Some(newer)) = (version(own), version(newest)) else { return Ok(record) };
        let before = now.settings();
        // A machine has its user data with its own values, so versions are compared as they are for this machine.
        let uuid = now.uuid.to_string();
        let values = Values {
            name: &now.name,
            host_name: &now.identity.host_name,
            catalog,
            mac: &now.mac,
            uuid: &uuid,
        };
        let of_machine = |settings: &SchemeSettings| {
            let text = settings.user_data.as_deref();
            // The template was checked when the version was made.
            let text = text.map(|text| template::render(text, &values).unwrap_or_else(|_| text.to_owned()));
            settings.clone().with_user_data(text)
        };
        let after = before.clone().merged(&of_machine(&base.settings), of_machine(&newer.settings));
        let detail = format!("version {own} -> {newest}: {}", in_words(&before.differences(&after)));
        let change = Change::between(&before, &after);
        record.catalog_scheme = Some(newest);
        record.take_settings(after, Some(newest));
        repo.machines().set_scheme(&record).await?;
        let event = self.event(caller, format!("machine {}", record.name), "scheme taken", detail);
        repo.events().append(event.changing(change)).await?;
        repo.save().await?;
        Ok(record)
    }
}
