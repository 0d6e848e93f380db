//! `headwater image edit`, `image seal`, `image discard` and `machine seal`. Edit begins a maintenance session, in
//! which a machine changes an image on a private disk; a seal makes a version of a disk. The daemon does the work.

use headwater_api::{MaintenanceRequest, MaintenanceSession, Pause, SealRequest, Sealed, TaskResult};
use headwater_block::size;

use crate::client::Client;
use crate::cmd::machine::{behind, warn};
use crate::show::{self, progress::Shown, progress::said_if_slow};

/// Begins a maintenance session.
pub async fn edit(client: &Client, image: &str, machine: String, json: bool) -> anyhow::Result<()> {
    let what = behind(&machine);
    let edit = said_if_slow(json, &what, client.edit(image, &MaintenanceRequest { machine })).await?;
    if json {
        return show::json(&edit);
    }
    warn(edit.warning.as_deref());
    let MaintenanceSession { image, version, machine, .. } = edit;
    show::line(&format!(
        "{machine} boots {image}@{version} on a private disk from its next start on; 'headwater image seal {image}' makes \
         a version of its changes, 'headwater image discard {image}' discards them"
    ))
}

/// Discards a maintenance session.
pub async fn discard(client: &Client, image: &str, json: bool) -> anyhow::Result<()> {
    let what = format!("waiting for the machine that edits {image}: another change of it may be in progress");
    said_if_slow(json, &what, client.discard_session(image)).await?;
    if json {
        return show::json(&serde_json::json!({ "discarded": [image] }));
    }
    show::line(&format!("the maintenance session of {image} is discarded"))
}

/// The request from the options.
pub fn request(note: Option<String>, over_newer: bool, keep_identity: bool) -> SealRequest {
    SealRequest { note: note.unwrap_or_default(), over_newer, keep_identity }
}

/// Seals a maintenance session.
pub async fn image(client: &Client, image: &str, request: SealRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("seal {image}"), json);
    let result = client.seal_image(image, &request, |progress| shown.update(progress)).await;
    shown.end();
    show_result(result?, json)
}

/// Makes a version of a machine's disk.
pub async fn machine(client: &Client, name: &str, request: SealRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("seal {name}"), json);
    let result = client.seal_machine(name, &request, |progress| shown.update(progress)).await;
    shown.end();
    show_result(result?, json)
}

fn show_list(heading: &str, list: &[String]) -> anyhow::Result<()> {
    if list.is_empty() {
        return Ok(());
    }
    show::line(heading)?;
    list.iter().try_for_each(|what| show::line(&format!("  {}", show::printable(what))))
}

fn show_result(result: TaskResult, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(&result);
    }
    let TaskResult::Sealed(sealed) = result else {
        anyhow::bail!(
            "the daemon did not answer with the sealed version: it may be of another release than this program"
        );
    };
    let Sealed {
        version,
        parent,
        newer,
        changed_bytes,
        production,
        pause,
        removed,
        identity,
        not_looked_into,
    } = *sealed;
    let (changed, stored) = (size::format(changed_bytes), size::format(version.stored_bytes));
    let name = format!("{}@{}", version.image, version.number);
    show::line(&format!(
        "sealed as {name} over {parent}, {changed} changed, {stored} stored, {}",
        version.hash
    ))?;
    if let Some(newer) = newer {
        show::line(&format!(
            "{newer} is newer than {parent}: its changes are not in {name}, unless this machine made them too"
        ))?;
    }
    if let Some(Pause { disk_us, guest_ms, remark }) = pause {
        let disk = format!("the disk paused for {}.{:03} ms", disk_us / 1000, disk_us % 1000);
        match (guest_ms, remark) {
            (Some(ms), _) => show::line(&format!("{disk}, the guest's file systems for {ms} ms"))?,
            (None, remark) => {
                let why = remark.map(|why| format!(": {}", show::printable(&why))).unwrap_or_default();
                show::line(&format!(
                    "{disk}; the version is as after a power cut, because the guest's file systems were not frozen{why}"
                ))?;
            }
        }
    }
    show_list("removed in the guest, before it was switched off:", &removed)?;
    if version.keeps_identity {
        show::line(&format!(
            "{name} is not generalised: 'headwater image promote {name} production' needs --force"
        ))?;
        show_list("the version contains the machine's identity:", &identity)?;
    }
    show_list("not searched for the identity:", &not_looked_into)?;
    if let Some(boots) = production {
        let image = &version.image;
        show::line(&format!(
            "production of {image} was not set; it now points to version {boots}, which machines boot"
        ))?;
    }
    let image = &version.image;
    show::line(&format!("'headwater image promote {name} test' lets machines of {image}:test boot it"))
}
