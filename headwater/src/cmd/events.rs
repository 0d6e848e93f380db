//! `headwater events`: who changed what, and when.

use headwater_api::EventList;

use crate::cli::EventsArgs;
use crate::client::Client;
use crate::show;

/// Shows the history, oldest first, as a log reads.
pub async fn run(client: Client, args: EventsArgs, json: bool) -> anyhow::Result<u8> {
    show(client.events(args.subject.as_deref(), args.limit).await?, json)?;
    Ok(0)
}

/// Shows events, oldest first.
pub fn show(list: EventList, json: bool) -> anyhow::Result<()> {
    if json {
        return show::json(&list);
    }
    let rows =
        list.events.into_iter().rev().map(|event| {
            vec![show::time(event.at_ms), event.actor, event.subject, event.action, event.detail]
        });
    show::table(&["TIME", "WHO", "WHAT", "ACTION", "DETAIL"], rows)
}
