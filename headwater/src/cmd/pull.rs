//! `headwater image pull`: makes the daemon copy versions from another store.

use std::path::Path;

use headwater_api::{
    Channel, ChannelMove, ChannelPointer, Problem, ProblemKind, PullReport, PullRequest, PulledImage,
    TaskResult,
};
use headwater_store::Copied;

use crate::client::Client;
use crate::cmd::image::absolute_path;
use crate::cmd::store::told;
use crate::show::{self, progress::Shown};

/// Pulls versions from a store; without names all of them.
pub async fn run(client: &Client, source: String, images: Vec<String>, json: bool) -> anyhow::Result<()> {
    let request = PullRequest { source: store_of_daemon(client, source)?, images };
    let mut shown = Shown::begin("pull", json);
    let result = client.pull(&request, |progress| shown.update(progress)).await;
    shown.end();
    let TaskResult::Pulled(report) = result? else {
        anyhow::bail!(
            "the daemon did not answer with the report of a pull: it may be of another version than this program"
        );
    };
    // Versions that were not copied are an error even if nobody reads the output.
    show::if_read(if json { show::json(&report) } else { show_report(&request.source, &report) })?;
    must_be_pulled(&report.not_copied)
}

/// Makes the name of a store valid for the daemon: directories are on its host, and its working directory is another
/// one.
pub fn store_of_daemon(client: &Client, store: String) -> anyhow::Result<String> {
    if store.contains("://") {
        return Ok(store);
    }
    client.sees(Path::new(&store))?;
    absolute_path(Path::new(&store))
}

/// Prints what a newer version means for the machine that edits its image.
pub fn warn_of_session(image: &str, machine: &str) {
    show::aside(&format!(
        "headwater: machine '{machine}' edits {image} over an older version: 'headwater image seal {image}' is refused now, unless \
         with --over-newer\n"
    ));
}

fn show_report(source: &str, report: &PullReport) -> anyhow::Result<()> {
    let PullReport { versions, present, objects, bytes, followed, .. } = *report;
    let copied = Copied { versions, present, objects, bytes, followed, failed: Vec::new() };
    let is_all = report.not_copied.is_empty();
    for image in &report.images {
        if let Some(machine) = &image.edited_by {
            warn_of_session(&image.image, machine);
        }
    }
    show::line(&told(&copied, is_all, source, "the daemon's store"))?;
    report.images.iter().flat_map(lines).try_for_each(|line| show::line(&line))
}

/// Further changes: which version machines boot, channels and scheduled promotions.
fn lines(image: &PulledImage) -> Vec<String> {
    let name = &image.image;
    let boots = moved(image);
    // The change of `production` for machines is already in the output.
    let is_said = |it: &&ChannelMove| it.channel == Channel::Production && boots.is_some();
    let channels = image.channels.iter().filter(|it| !is_said(it)).map(|it| {
        let ChannelMove { channel, from, to } = it;
        match (from, to) {
            (_, None) => format!("channel {channel} of {name} is not set any more"),
            (None, Some(to)) => format!("channel {channel} of {name} now points to version {to}"),
            (Some(from), Some(to)) => {
                format!("channel {channel} of {name} now points to version {to} instead of version {from}")
            }
        }
    });
    let promotion = |it: &ChannelPointer, will: &str| {
        format!(
            "version {} of {name} {will} promoted to {} at {}",
            it.version,
            it.channel,
            show::time(it.at_ms)
        )
    };
    let scheduled = image.scheduled.iter().map(|it| promotion(it, "will be"));
    let forgotten = image.forgets.iter().map(|it| promotion(it, "will not be"));
    let more: Vec<String> = channels.chain(scheduled).chain(forgotten).collect();
    boots.into_iter().chain(more).collect()
}

/// A line if machines now boot another version of an image.
fn moved(image: &PulledImage) -> Option<String> {
    let PulledImage { image: name, followed, booted, boots, .. } = image;
    // If there was no version to boot before, none was replaced.
    let booted = (*booted).filter(|booted| *boots != Some(*booted))?;
    Some(match boots {
        None => format!(
            "all versions of {name} are retired: machines that boot '{name}' do not start until one is in use again"
        ),
        Some(boots) if *followed => format!(
            "machines that boot '{name}' boot version {boots} instead of version {booted} from their next boot on"
        ),
        // Channels were not copied, so the newest version is booted.
        Some(boots) => format!(
            "production of {name} is not set: machines that boot '{name}' boot version {boots} from their next boot on; 'headwater \
             image promote {name}@{booted} production' holds them to version {booted}"
        ),
    })
}

/// Fails with the versions that were not copied, each with its reason. If any of them is damaged, the error is of
/// that kind.
fn must_be_pulled(not_copied: &[Problem]) -> anyhow::Result<()> {
    let Some(last) = not_copied.last() else { return Ok(()) };
    let is_damaged = not_copied.iter().any(|problem| problem.kind == ProblemKind::Damaged);
    let kind = if is_damaged { ProblemKind::Damaged } else { last.kind };
    let told: Vec<String> = not_copied.iter().map(ToString::to_string).collect();
    Err(Problem::new(kind, format!("not copied: {}", told.join("; "))).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_and_promotions_that_are_others_now_are_told_of() {
        let moved = |channel, from, to| ChannelMove { channel, from, to };
        let to_come =
            |channel, version| ChannelPointer { channel, version, at_ms: 0, author: "ben".to_owned() };
        let mut image = PulledImage {
            image: "deb".to_owned(),
            followed: true,
            channels: vec![
                moved(Channel::Production, Some(2), Some(3)),
                moved(Channel::Test, Some(3), Some(4)),
                moved(Channel::Test, Some(4), None),
            ],
            scheduled: vec![to_come(Channel::Test, 5)],
            forgets: vec![to_come(Channel::Production, 4)],
            booted: Some(3),
            boots: Some(3),
            ..PulledImage::default()
        };
        let others = [
            "channel test of deb now points to version 4 instead of version 3".to_owned(),
            "channel test of deb is not set any more".to_owned(),
            format!("version 5 of deb will be promoted to test at {}", show::time(0)),
            format!("version 4 of deb will not be promoted to production at {}", show::time(0)),
        ];
        let told = lines(&image);
        assert_eq!(told[0], "channel production of deb now points to version 3 instead of version 2");
        assert_eq!(told[1..], others);
        // The same note is not printed twice.
        image.booted = Some(2);
        let told = lines(&image);
        assert!(told[0].starts_with("machines that boot 'deb' boot version 3"), "{told:?}");
        assert_eq!(told[1..], others);
    }

    #[test]
    fn another_version_that_machines_boot_now_is_told_of() {
        let says = |followed, booted, boots| {
            moved(&PulledImage { image: "deb".to_owned(), followed, booted, boots, ..PulledImage::default() })
        };
        // There was no version before, and the result is the same.
        assert_eq!(says(false, None, Some(3)), None);
        assert_eq!(says(true, Some(2), Some(2)), None);
        let told = says(false, Some(2), Some(3)).unwrap();
        assert!(
            told.starts_with("production of deb is not set: machines that boot 'deb' boot version 3 "),
            "{told}"
        );
        assert!(told.contains("promote deb@2 production' holds them to version 2"), "{told}");
        let told = says(true, Some(2), Some(3)).unwrap();
        assert!(told.contains("boot version 3 instead of version 2 from their next boot on"), "{told}");
        assert!(says(true, Some(2), None).unwrap().contains("do not start"));
    }

    #[test]
    fn what_did_not_come_is_named_and_damage_decides() {
        assert!(must_be_pulled(&[]).is_ok());
        let problem = |kind, what: &str, why: &str| Problem::new(kind, why).during(what);
        let error = must_be_pulled(&[
            problem(ProblemKind::Damaged, "a@1", "it is cut"),
            problem(ProblemKind::NotFound, "b@2", "it was removed"),
        ]);
        let problem = error.unwrap_err().downcast::<Problem>().unwrap();
        assert_eq!(problem.kind, ProblemKind::Damaged);
        assert_eq!(problem.message, "not copied: a@1: it is cut; b@2: it was removed");
    }
}
