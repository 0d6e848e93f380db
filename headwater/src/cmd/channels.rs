//! `headwater image versions|promote|revert|pin|unpin|retire|note|history`: which version each role boots, and notes
//! about versions.

use std::time::{SystemTime, UNIX_EPOCH};

use headwater_api::name::ImageRef;
use headwater_api::{
    Channel, ChannelPointer, ChannelRequest, Image, ImageVersion, Machine, MaintenanceSession, NoteRequest,
    PinRequest, Problem, ProblemKind, PromoteRequest, RetireRequest,
};
use headwater_block::size;

use crate::client::Client;
use crate::cmd::{catalog, events, image, when};
use crate::show::{self, progress::said_if_slow};

/// The message while a request waits for the store. Answered at once unless the store is slow.
pub fn behind_store(of: &str) -> String {
    format!(
        "waiting for the store ({of}): it is slow or does not answer, or somebody else changes, removes or starts to use versions"
    )
}

/// Lists an image's versions and scheduled promotions.
pub async fn versions(client: &Client, image: &str, json: bool) -> anyhow::Result<()> {
    let image = said_if_slow(json, &behind_store(image), client.image(image)).await?;
    if json {
        return show::json(&image);
    }
    let machines = client.machines().await?.machines;
    let headings = ["VERSION", "CHANNELS", "STATE", "CREATED", "AUTHOR", "SIZE", "ADDED", "MACHINES", "NOTE"];
    show::table(&headings, image.versions.iter().map(|version| row(version, &machines)))?;
    for pointer in &image.scheduled {
        let ChannelPointer { channel, version, at_ms, author } = pointer;
        let at = show::time(*at_ms);
        show::line(&format!("{channel} will be version {version} at {at}, scheduled by {author}"))?;
    }
    show_session(&image)
}

/// Prints the image's maintenance session, if there is one.
pub fn show_session(image: &Image) -> anyhow::Result<()> {
    let Some(MaintenanceSession { version, machine, since_ms, author, .. }) = &image.edit else {
        return Ok(());
    };
    let since = show::time(*since_ms);
    show::line(&format!(
        "machine {machine} edits the image over version {version} since {since}, begun by {author}"
    ))
}

/// Whether a version is in use, and warnings about it.
fn state(version: &ImageVersion) -> String {
    let state = if version.retired { "retired" } else { "in use" };
    let mark = if version.keeps_identity { ", not generalised" } else { "" };
    format!("{state}{mark}")
}

fn row(version: &ImageVersion, machines: &[Machine]) -> Vec<String> {
    let name = format!("{}@{}", version.image, version.number);
    let running = machines
        .iter()
        .filter(|machine| machine.state.is_active() && machine.version.as_ref() == Some(&name));
    let channels: Vec<&str> = version.channels.iter().map(|channel| channel.name()).collect();
    vec![
        version.number.to_string(),
        if channels.is_empty() { "-".to_owned() } else { channels.join(", ") },
        state(version),
        show::time(version.created_at_ms),
        if version.author.is_empty() { "-".to_owned() } else { version.author.clone() },
        size::format(version.size_bytes),
        size::format(version.stored_bytes),
        running.count().to_string(),
        version.note.clone(),
    ]
}

/// Promotes a channel, now or later; with `force` also to a version that is not generalised.
pub async fn promote(
    client: &Client,
    image: &str,
    channel: Channel,
    (at, force): (Option<String>, bool),
    json: bool,
) -> anyhow::Result<()> {
    let now_ms = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?;
    let at_ms = at.map(|text| when::parse(&text, now_ms)).transpose()?;
    let request = PromoteRequest { channel, at_ms, force };
    let promoted = said_if_slow(json, &behind_store(image), client.promote(image, &request)).await?;
    if json {
        return show::json(&promoted);
    }
    let name = image.split('@').next().unwrap_or(image);
    let version = promoted.version;
    let forgets = promoted.forgets.map(|forgotten| {
        let at = show::time(forgotten.at_ms);
        format!(
            "; cancels the promotion to version {} at {at}, scheduled by {}",
            forgotten.version, forgotten.author
        )
    });
    let forgets = forgets.unwrap_or_default();
    if at_ms.is_some() {
        let at = show::time(promoted.at_ms);
        return show::line(&format!("{channel} of {name} will be version {version} at {at}{forgets}"));
    }
    show::line(&format!("{channel} of {name} is version {version}{forgets}"))?;
    show_outdated(client, name, channel).await
}

/// Prints the machines that follow a channel and change at their next boot.
async fn show_outdated(client: &Client, image: &str, channel: Channel) -> anyhow::Result<()> {
    let machines = match said_if_slow(false, &behind_store(image), client.machines()).await {
        Ok(list) => list.machines,
        // Not a failure, because the channel has moved: a script would otherwise revert once more.
        Err(e) => {
            let why = format!(
                "the channel was changed, but it is not known which machines still run another version: {e:#}"
            );
            show::aside(&format!("headwater: {}\n", show::printable(&why)));
            return Ok(());
        }
    };
    let old = machines.iter().filter(|machine| machine.old && follows(machine, image, channel));
    let (kept, others): (Vec<&Machine>, Vec<&Machine>) = old.partition(|machine| machine.kept.is_some());
    let told = |when: &str, machines: &[&Machine]| {
        let names: Vec<&str> = machines.iter().map(|machine| machine.name.as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        show::line(&format!("these machines change to it {when}: {}", names.join(", ")))
    };
    told("at their next boot", &others)?;
    told("when they are reset, because their disks are persistent", &kept)
}

/// Whether a machine boots the version of this channel.
fn follows(machine: &Machine, image: &str, channel: Channel) -> bool {
    let follows = |boots: ImageRef| {
        boots.image == image
            && boots.version.is_none()
            && boots.channel.unwrap_or(Channel::Production) == channel
    };
    machine.pin.is_none() && ImageRef::parse(&machine.image).is_ok_and(follows)
}

/// Cancels a scheduled promotion.
pub async fn cancel(client: &Client, image: &str, channel: Channel, json: bool) -> anyhow::Result<()> {
    let cancelling = client.cancel_promotion(image, channel);
    let pointer = said_if_slow(json, &behind_store(image), cancelling).await?;
    if json {
        return show::json(&pointer);
    }
    show::line(&format!("{channel} of {image} will not become version {}", pointer.version))
}

/// Reverts the last promotion of a channel.
pub async fn revert(client: &Client, image: &str, channel: Channel, json: bool) -> anyhow::Result<()> {
    let request = ChannelRequest { channel };
    let pointer = said_if_slow(json, &behind_store(image), client.revert(image, &request)).await?;
    if json {
        return show::json(&pointer);
    }
    let name = channel.name();
    show::line(&match (pointer.version, channel) {
        (Some(version), _) => format!("{name} of {image} is version {version} again"),
        (None, Channel::Production) => format!(
            "{name} of {image} is not set any more, as before its first promotion: machines that name only {image} boot its newest version"
        ),
        (None, _) => format!(
            "{name} of {image} is not set any more, as before its first promotion: machines that boot {image}:{name} do not start \
             until it is"
        ),
    })?;
    show_outdated(client, image, channel).await
}

/// Whether a name is that of a catalog. Machines never have the name of a catalog.
async fn is_catalog(client: &Client, name: &str) -> anyhow::Result<bool> {
    match client.catalog(name).await {
        Ok(_) => Ok(true),
        Err(e) if e.downcast_ref::<Problem>().is_some_and(|it| it.kind == ProblemKind::NotFound) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Pins a machine, or all machines of a catalog, to a version.
pub async fn pin(client: &Client, name: &str, version: String, json: bool) -> anyhow::Result<()> {
    let (what, request) = (behind_store(&version), PinRequest { version });
    if is_catalog(client, name).await? {
        let catalog = said_if_slow(json, &what, client.pin_catalog(name, &request)).await?;
        return if json { show::json(&catalog) } else { catalog::show_next_version(&catalog) };
    }
    let machine = said_if_slow(json, &what, client.pin(name, &request)).await?;
    if json {
        return show::json(&machine);
    }
    let pin = machine.pin.unwrap_or_default();
    match machine.kept {
        Some(kept) if kept != pin => show::line(&format!(
            "{name} boots {pin} after a reset; until then its persistent disk is based on {kept}"
        )),
        _ => show::line(&format!("{name} boots {pin} from its next boot on")),
    }
}

/// Removes the pin of a machine or catalog.
pub async fn unpin(client: &Client, name: &str, json: bool) -> anyhow::Result<()> {
    let what = behind_store(&format!("the image of {name}"));
    if is_catalog(client, name).await? {
        let catalog = said_if_slow(json, &what, client.unpin_catalog(name)).await?;
        return if json { show::json(&catalog) } else { catalog::show_next_version(&catalog) };
    }
    let machine = said_if_slow(json, &what, client.unpin(name)).await?;
    if json {
        return show::json(&machine);
    }
    let next = match &machine.next_version {
        Some(next) => format!("which is {next}"),
        None => "which does not exist, so the machine cannot start".to_owned(),
    };
    show::line(&format!("{} follows {}, {next}", machine.name, machine.image))
}

/// Retires a version, or brings it back into use.
pub async fn retire(client: &Client, image: &str, undo: bool, json: bool) -> anyhow::Result<()> {
    let request = RetireRequest { retired: !undo };
    let version = said_if_slow(json, &behind_store(image), client.retire(image, &request)).await?;
    if json {
        return show::json(&version);
    }
    let state = if version.retired { "retired" } else { "in use again" };
    show::line(&format!("{}@{} is {state}", version.image, version.number))?;
    // Without `production`, the image may resolve to another version now.
    match image::moved(client, &version).await {
        Some(moved) => {
            show::line(&moved)?;
            show_outdated(client, &version.image, Channel::Production).await
        }
        None => Ok(()),
    }
}

/// Changes the note of a version.
pub async fn note(client: &Client, image: &str, note: String, json: bool) -> anyhow::Result<()> {
    let request = NoteRequest { note };
    let version = said_if_slow(json, &behind_store(image), client.note(image, &request)).await?;
    if json {
        return show::json(&version);
    }
    let place = format!("{}@{}", version.image, version.number);
    show::line(&match version.note.as_str() {
        "" => format!("{place} has no note"),
        note => format!("{place} has the note '{}'", show::printable(note)),
    })
}

/// Shows who changed an image, and when.
pub async fn history(client: &Client, image: &str, limit: u32, json: bool) -> anyhow::Result<()> {
    // The history is of the image, even if the reference names a version.
    let named = ImageRef::parse(image).ok().map(|named| named.image);
    let list =
        client.events(Some(&format!("image {}", named.as_deref().unwrap_or(image))), None, limit).await?;
    if list.events.is_empty() {
        // A removed image has a history; an image that never existed is an error.
        said_if_slow(json, &behind_store(image), client.image(image)).await?;
    }
    events::show(list, json)
}

/// The positions of an image's channels, for a table.
pub fn summary(image: &Image) -> String {
    let of = |channel: Channel| {
        let version = image.versions.iter().find(|version| version.channels.contains(&channel))?;
        Some(format!("{channel} {}", version.number))
    };
    let set: Vec<String> = [Channel::Test, Channel::Production].into_iter().filter_map(of).collect();
    if set.is_empty() { "-".to_owned() } else { set.join(", ") }
}
