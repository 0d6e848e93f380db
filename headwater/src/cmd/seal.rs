//! `image edit`, `image seal`, `image discard` and `machine seal`: maintenance of images.

use headwater_api::{MaintenanceRequest, MaintenanceSession, Pause, SealRequest, Sealed, TaskResult};
use headwater_block::size;

use crate::client::Client;
use crate::cmd::machine::{behind, warn};
use crate::show::{self, progress::Shown, progress::said_if_slow};

/// Has a machine edit an image.
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
         a version of what it does, 'headwater image discard {image}' forgets it"
    ))
}

/// Forgets what was edited.
pub async fn discard(client: &Client, image: &str, json: bool) -> anyhow::Result<()> {
    let what =
        format!("waiting for another change of the machine that edits {image}, which may be under way");
    said_if_slow(json, &what, client.discard_session(image)).await?;
    if json {
        return show::json(&serde_json::json!({ "discarded": [image] }));
    }
    show::line(&format!("what was changed of {image} is forgotten"))
}

/// What the options of a seal say.
pub fn request(note: Option<String>, over_newer: bool, keep_identity: bool) -> SealRequest {
    SealRequest { note: note.unwrap_or_default(), over_newer, keep_identity }
}

/// Makes a version of what was edited.
pub async fn image(client: &Client, image: &str, request: SealRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("seal {image}"), json);
    let result = client.seal_image(image, &request, |progress| shown.update(progress)).await;
    shown.end();
    told(result?, json)
}

/// Makes a version of a machine's disk.
pub async fn machine(client: &Client, name: &str, request: SealRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("seal {name}"), json);
    let result = client.seal_machine(name, &request, |progress| shown.update(progress)).await;
    shown.end();
    told(result?, json)
}

fn told_list(heading: &str, list: &[String]) -> anyhow::Result<()> {
    if list.is_empty() {
        return Ok(());
    }
    show::line(heading)?;
    list.iter().try_for_each(|what| show::line(&format!("  {}", show::printable(what))))
}

fn told(result: TaskResult, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(&result);
    }
    let TaskResult::Sealed(sealed) = result else {
        anyhow::bail!("the daemon answered something else than a version: is it of another version?");
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
            "{newer} is newer than {parent}: what it changed is in {name} only where this machine did it, too"
        ))?;
    }
    if let Some(Pause { disk_us, guest_ms, remark }) = pause {
        let disk = format!("the disk paused for {}.{:03} ms", disk_us / 1000, disk_us % 1000);
        match (guest_ms, remark) {
            (Some(ms), _) => show::line(&format!("{disk}, the guest's file systems for {ms} ms"))?,
            (None, remark) => {
                let why = remark.map(|why| format!(": {}", show::printable(&why))).unwrap_or_default();
                show::line(&format!(
                    "{disk}; the version is as after a power cut, since the guest's file systems were not frozen{why}"
                ))?;
            }
        }
    }
    told_list("removed in the guest, before it was switched off:", &removed)?;
    if version.keeps_identity {
        show::line(&format!(
            "{name} is not generalised: 'headwater image promote {name} production' needs --force"
        ))?;
        told_list("the machine's identity is in it:", &identity)?;
    }
    told_list("not looked into for that:", &not_looked_into)?;
    if let Some(boots) = production {
        let image = &version.image;
        show::line(&format!(
            "production of {image} was not set, and is version {boots} from now on, which machines boot"
        ))?;
    }
    show::line(&format!("'headwater image promote {name} test' lets machines boot it"))
}
