//! `headwater image publish`, `published` and `unpublish`: versions in the galleries of clouds.

use headwater_api::{
    PublishReport, PublishRequest, PublishState, PublishedImage, TaskResult, UnpublishRequest,
};
use headwater_block::size;

use crate::client::Client;
use crate::show::{self, progress::Shown};

/// Publishes a version.
pub async fn publish(
    client: &Client,
    image: &str,
    request: PublishRequest,
    json: bool,
) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("publish {image}"), json);
    let result = client.publish(image, &request, |step| shown.update(step)).await;
    shown.end();
    let TaskResult::Published(report) = result? else {
        anyhow::bail!(
            "the daemon did not answer with the published version: it may be of another version than this program"
        );
    };
    if json { show::json(&report) } else { show_published(&report) }
}

/// The result of `image publish`.
pub fn show_published(report: &PublishReport) -> anyhow::Result<()> {
    let PublishReport { published, created, sent_bytes, remarks } = report;
    let PublishedImage { image, version, connection, generation, replicas, resource, .. } = published;
    for remark in remarks {
        show::aside(&format!("headwater: {}\n", show::printable(remark)));
    }
    if !created {
        return show::line(&format!("{image}@{version} is published to {connection} already: {resource}"));
    }
    let replicas = if *replicas == 1 { "1 replica".to_owned() } else { format!("{replicas} replicas") };
    show::line(&format!(
        "{image}@{version} is published to {connection}: generation {generation}, {replicas}, {} sent",
        size::format(*sent_bytes)
    ))?;
    show::line(resource)
}

/// Removes a published version.
pub async fn unpublish(client: &Client, image: &str, connection: String, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("unpublish {image}"), json);
    let request = UnpublishRequest { connection };
    let result = client.unpublish(image, &request, |step| shown.update(step)).await;
    shown.end();
    let TaskResult::Unpublished(removed) = result? else {
        anyhow::bail!(
            "the daemon did not answer with the removed version: it may be of another version than this program"
        );
    };
    if json { show::json(&removed) } else { show_unpublished(&removed) }
}

/// The result of `image unpublish`.
pub fn show_unpublished(removed: &PublishedImage) -> anyhow::Result<()> {
    let PublishedImage { image, version, connection, .. } = removed;
    show::line(&format!("{image}@{version} is not published to {connection} any more"))
}

/// Lists published versions.
pub async fn list(client: &Client, image: Option<&str>, json: bool) -> anyhow::Result<()> {
    let list = client.published(image).await?;
    if json {
        return show::json(&list);
    }
    let row = |it: &PublishedImage| {
        let state = match it.state {
            PublishState::Publishing => "incomplete",
            state => state.name(),
        };
        vec![
            format!("{}@{}", it.image, it.version),
            it.connection.clone(),
            state.to_owned(),
            it.generation.to_string(),
            it.replicas.to_string(),
            show::time(it.created_at_ms),
            it.created_by.clone(),
        ]
    };
    let headings = ["VERSION", "CONNECTION", "STATE", "GEN", "REPLICAS", "SINCE", "BY"];
    show::table(&headings, list.published.iter().map(row))
}
