//! `headwater events`: who changed what, and when.

use headwater_api::EventList;

use crate::cli::EventsArgs;
use crate::client::Client;
use crate::show;

/// Shows the history, oldest first, as a log reads.
pub async fn run(client: Client, args: EventsArgs, json: bool) -> anyhow::Result<u8> {
    let list = client.events(args.subject.as_deref(), args.before, args.limit).await?;
    let cut = u32::try_from(list.events.len()).is_ok_and(|given| given == args.limit);
    let oldest = list.events.last().map(|event| event.id);
    show(list, json)?;
    if let (false, true, Some(id)) = (json, cut, oldest) {
        show::aside(&format!("older ones, if there are any: --before {id}\n"));
    }
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
