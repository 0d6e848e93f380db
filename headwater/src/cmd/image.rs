//! `headwater image`: manages images and versions with requests to the daemon. Other files have some subcommands:
//! `channels`, `diff`, `pull`, `seal` and `trace`.

use std::path::Path;

use headwater_api::name::{check_image, image_name_of};
use headwater_api::{
    Channel, ExportFormat, ExportRequest, Image, ImageVersion, ImportRequest, Problem, ProblemKind,
    PublishRequest, SourceFormat, TaskResult, VerifyReport, VerifyRequest,
};
use headwater_block::size;
use headwater_nbd::NbdUri;
use headwater_store::NOTE_MAX_BYTES;

use crate::cli::ImageCommand;
use crate::client::Client;
use crate::cmd::spool::Spooled;
use crate::cmd::{channels, diff, publish, pull, seal, source_url, trace};
use crate::data_dir;
use crate::failure::{DAMAGED, invalid};
use crate::own_files;
use crate::show::{self, progress::Shown, progress::said_if_slow};
use crate::verification;

/// Runs a command.
pub async fn run(client: Client, command: ImageCommand, json: bool) -> anyhow::Result<u8> {
    match command {
        ImageCommand::Import { source, name, note, format, backing, sector_bytes } => {
            let named = Named { name, note: note.unwrap_or_default() };
            let result =
                import(&client, &source, Form { format, backing, sector_bytes }, named, json).await?;
            if json {
                show::json(&result)?;
            } else if let TaskResult::Imported { version, created, .. } = &result {
                advice(&client, version, *created).await.iter().try_for_each(|line| show::line(line))?;
            }
        }
        ImageCommand::Pull { source, images } => pull::run(&client, source, images, json).await?,
        ImageCommand::List => {
            let what = channels::behind_store("the list of images");
            let list = said_if_slow(json, &what, client.images()).await?;
            // An incomplete list is an error even if nobody reads the output.
            show::if_read(if json { show::json(&list) } else { show_list(&list.images) })?;
            if let Some(first) = list.unreadable.first() {
                let all: Vec<String> = list.unreadable.iter().map(ToString::to_string).collect();
                return Err(Problem::new(first.kind, all.join("; ")).into());
            }
        }
        ImageCommand::Show { image } => {
            let image = said_if_slow(json, &channels::behind_store(&image), client.image(&image)).await?;
            if json { show::json(&image)? } else { show_versions(&image)? }
        }
        ImageCommand::Versions { image } => channels::versions(&client, &image, json).await?,
        ImageCommand::Promote { image, channel, cancel: true, .. } => {
            channels::cancel(&client, &image, channel, json).await?;
        }
        ImageCommand::Promote { image, channel, at, force, .. } => {
            channels::promote(&client, &image, channel, (at, force), json).await?;
        }
        ImageCommand::Revert { image, channel } => channels::revert(&client, &image, channel, json).await?,
        ImageCommand::Pin { name, image } => channels::pin(&client, &name, image, json).await?,
        ImageCommand::Unpin { name } => channels::unpin(&client, &name, json).await?,
        ImageCommand::Edit { image, machine } => seal::edit(&client, &image, machine, json).await?,
        ImageCommand::Seal { image, note, over_newer, keep_identity } => {
            seal::image(&client, &image, seal::request(note, over_newer, keep_identity), json).await?;
        }
        ImageCommand::Discard { image } => seal::discard(&client, &image, json).await?,
        ImageCommand::Retire { image, undo } => channels::retire(&client, &image, undo, json).await?,
        ImageCommand::Note { image, text } => channels::note(&client, &image, text, json).await?,
        ImageCommand::Diff { from, to } => diff::run(&client, &from, &to, json).await?,
        ImageCommand::Trace(command) => return trace::run(&client, command, json).await,
        ImageCommand::History { image, limit } => channels::history(&client, &image, limit, json).await?,
        ImageCommand::Verify { image, rate, repair_from } => {
            return verify(&client, &image, rate, repair_from, json).await;
        }
        ImageCommand::Export { image, file, format } => {
            let format = format.map_or_else(|| ExportFormat::of_file_name(&file).map_err(invalid), Ok)?;
            client.sees(&file)?;
            export(&client, &image, ExportRequest { target: new_file(&file)?, format }, json).await?;
        }
        ImageCommand::Publish { image, connection, replicas, no_agent_check, nvme } => {
            let request = PublishRequest { connection, replicas, no_agent_check, nvme };
            publish::publish(&client, &image, request, json).await?;
        }
        ImageCommand::Published { image } => publish::list(&client, image.as_deref(), json).await?,
        ImageCommand::Unpublish { image, connection } => {
            publish::unpublish(&client, &image, connection, json).await?;
        }
        ImageCommand::Remove { image, force } => remove(&client, &image, force, json).await?,
    }
    Ok(0)
}

async fn remove(client: &Client, image: &str, force: bool, json: bool) -> anyhow::Result<()> {
    let removing = client.remove_image(image, force);
    let removed = said_if_slow(json, &channels::behind_store(image), removing).await?;
    if json {
        return show::json(&removed);
    }
    let freed = size::format(removed.freed_bytes);
    show::line(&format!("removed {}; {freed} freed", removed.removed.join(", ")))
}

/// The source that means standard input; paths that lead to it have the same meaning.
const STANDARD_INPUT: &str = "-";

const NO_NAME: &str = "cannot import the standard input without a name for the image: give --name";

const ELSEWHERE: &str = "import it on the server that writes the store";

const NEW_FILE: &str = "name a new file, and read that; for a file with the name '-' write './-'";

/// The name and note of a version to make.
#[derive(Debug, Default)]
pub struct Named {
    /// The image's name; absent: made from the source's name.
    pub name: Option<String>,
    /// A line about the version.
    pub note: String,
}

/// How the source of an import is read: its format, backing files, and sector size.
#[derive(Debug, Default)]
pub struct Form {
    /// Its format; absent: detected from the first bytes.
    pub format: Option<SourceFormat>,
    /// Whether its backing files may be outside of its directory.
    pub backing: bool,
    /// Size of the disk's sectors; absent: detected.
    pub sector_bytes: Option<u32>,
}

/// Imports a file or an NBD export, also for `headwater run`. Prints the result unless `quiet`.
pub async fn import(
    client: &Client,
    source: &str,
    form: Form,
    named: Named,
    quiet: bool,
) -> anyhow::Result<TaskResult> {
    source_url::check_import(source)?;
    let path = if is_standard_input(source) {
        None
    } else {
        match source.parse::<NbdUri>() {
            Ok(mut uri) => uri.paths_mut().try_for_each(|path| client.sees(path))?,
            Err(_) if NbdUri::is_uri(source) => {}
            Err(_) => client.sees(Path::new(source))?,
        }
        Some(absolute(source)?)
    };
    let name = match named.name {
        Some(name) => name,
        None if path.is_none() => return Err(invalid(NO_NAME)),
        None => name_of(source)?,
    };
    check_image(&name)?;
    check_note(&named.note)?;
    let spooled = if path.is_none() { Some(spool(client, &name, quiet).await?) } else { None };
    let source_name = spooled.is_some().then(|| "standard input".to_owned());
    let source_id = spooled.as_ref().map(Spooled::id).transpose()?;
    let source = path.or_else(|| spooled.as_ref().map(Spooled::path)).unwrap_or_default();
    let mut shown = Shown::begin(&format!("import {name}"), quiet);
    let Form { format, backing, sector_bytes } = form;
    let note = named.note;
    let request = ImportRequest { name, source, format, backing, source_name, source_id, sector_bytes, note };
    let result = client.import(&request, |progress| shown.update(progress)).await;
    shown.end();
    let result = result.map_err(|e| match spooled {
        Some(_) => of_standard_input(e, &request.source),
        None => for_other_user(client, &request.source, e),
    })?;
    if let TaskResult::Imported { version, created, damaged_chunks, remarks, edited_by } = &result
        && !quiet
    {
        remark(client, version, *damaged_chunks, edited_by.as_deref());
        say_seen(remarks);
        let what = if *created { "imported as" } else { "unchanged; it is" };
        if !*created && !request.note.is_empty() && request.note != version.note {
            show::aside(&format!("headwater: {}\n", note_of_persistent(version)));
        }
        let (whole, stored) = (size::format(version.size_bytes), size::format(version.stored_bytes));
        let place = format!("{}@{}", version.image, version.number);
        show::line(&format!("{what} {place}, {whole}, {stored} stored, {}", version.hash))?;
    }
    Ok(result)
}

/// Adds advice to the error if the daemon runs as another user, who may not be able to read the file.
fn for_other_user(client: &Client, path: &str, error: anyhow::Error) -> anyhow::Error {
    let Some(owner) = client.data_dir().and_then(data_dir::other_owner) else { return error };
    match error.downcast::<Problem>() {
        Ok(problem) if problem.kind != ProblemKind::Damaged && std::fs::File::open(path).is_ok() => {
            let advice = format!(
                "if the daemon, which is user {owner}, cannot read the file: 'headwater image import - --name IMAGE < {path}'"
            );
            let advice =
                problem.advice.as_ref().map_or_else(|| advice.clone(), |old| format!("{old}; {advice}"));
            problem.advise(advice).into()
        }
        Ok(problem) => problem.into(),
        Err(error) => error,
    }
}

/// Replaces the name of a temporary file, which will be removed, in an error.
fn of_standard_input(error: anyhow::Error, spooled: &str) -> anyhow::Error {
    let mut problem = match error.downcast::<Problem>() {
        Ok(problem) => problem,
        Err(other) => return other,
    };
    let texts = problem.causes.iter_mut().chain([&mut problem.message]).chain(problem.advice.as_mut());
    let mut is_named = false;
    for text in texts {
        is_named |= text.contains(spooled);
        *text = text.replace(spooled, "FILE");
    }
    if is_named {
        let save =
            "FILE is the data of standard input: save it to a file, or run the program earlier in the pipe";
        problem.advice =
            Some(problem.advice.map_or_else(|| save.to_owned(), |advice| format!("{advice}; {save}")));
    }
    problem.into()
}

/// Advice about which version machines boot after an import, if the import alone does not show it.
async fn advice(client: &Client, version: &ImageVersion, created: bool) -> Option<String> {
    // The import has succeeded, so errors here are ignored.
    let image = client.image(&version.image).await.ok()?;
    let ImageVersion { image: name, number, .. } = version;
    match production_of(&image) {
        Some(production) if production != *number => Some(format!(
            "production of {name} is version {production}; 'headwater image promote {name}@{number} production' lets machines boot this one"
        )),
        _ if created => booted_next(&image, *number),
        _ => None,
    }
}

/// A note if the import, retirement or return of a version changed what machines boot that name only the image.
pub async fn moved(client: &Client, version: &ImageVersion) -> Option<String> {
    let image = client.image(&version.image).await.ok()?;
    if version.retired { booted_instead(&image, version.number) } else { booted_next(&image, version.number) }
}

/// A note that machines now boot a new version, because `production` is not set.
fn booted_next(image: &Image, number: u64) -> Option<String> {
    if production_of(image).is_some() || newest(image)?.number != number {
        return None;
    }
    let name = &image.name;
    let mut older = image.versions.iter().rev().filter(|version| version.number < number);
    // If there was no other version to boot, none was replaced.
    let former = older.find(|version| !version.retired && !version.keeps_identity)?.number;
    Some(format!(
        "production of {name} is not set: machines that boot '{name}' boot version {number} from their next boot on; 'headwater \
         image promote {name}@{former} production' holds them to version {former}"
    ))
}

/// The version that machines boot instead of a retired one, because `production` is not set.
fn booted_instead(image: &Image, retired: u64) -> Option<String> {
    if production_of(image).is_some() || newest(image).is_some_and(|newest| newest.number > retired) {
        return None;
    }
    let name = &image.name;
    Some(match newest(image) {
        Some(newest) => format!(
            "production of {name} is not set: machines that boot '{name}' boot version {} from their next boot on",
            newest.number
        ),
        None => format!(
            "all versions of {name} are retired or not generalised: machines that boot '{name}' do not start until one is in use again"
        ),
    })
}

/// The version to which an image resolves while `production` is not set.
fn newest(image: &Image) -> Option<&ImageVersion> {
    image.versions.iter().rev().find(|version| !version.retired && !version.keeps_identity)
}

/// The version to which `production` points, if it is set.
fn production_of(image: &Image) -> Option<u64> {
    let mut pointers = image.pointers.iter().rev();
    pointers.find(|pointer| pointer.channel == Channel::Production).map(|pointer| pointer.version)
}

/// Prints remarks about an import that succeeded. The JSON of the result has them too.
pub fn remark(client: &Client, version: &ImageVersion, damaged_chunks: u64, edited_by: Option<&str>) {
    let ImageVersion { image, number, .. } = version;
    if damaged_chunks > 0 {
        // The daemon knows the store's path if it is not in the data directory.
        let store = client.data_dir().map_or_else(|| "STORE".into(), |dir| dir.join("store"));
        show::aside(&format!(
            "headwater: {damaged_chunks} chunks in the store are damaged; {image}@{number} has intact copies of them, \
             but older versions, of other images too, may need the damaged chunks: 'headwater store verify {}' (or the directory \
             that --store or --from named) shows these versions, and 'headwater image verify IMAGE@NUMBER --repair-from STORE' \
             repairs a version\n",
            store.display()
        ));
    }
    if let Some(machine) = edited_by {
        pull::warn_of_session(image, machine);
    }
}

/// Prints notes about an imported disk.
pub fn say_seen(remarks: &[String]) {
    for line in remarks {
        show::aside(&format!("headwater: {line}\n"));
    }
}

/// A note if a version with the same bytes exists, so that the given note was ignored.
fn note_of_persistent(version: &ImageVersion) -> String {
    let (place, note) = (format!("{}@{}", version.image, version.number), show::printable(&version.note));
    let has = if note.is_empty() { "it has no note".to_owned() } else { format!("its note stays '{note}'") };
    format!(
        "{place} already has these bytes, and {has}: 'headwater image note {place} TEXT' changes the note"
    )
}

/// Whether a text means a disk to import, and not an image of the store. An existing directory with the name of an
/// image is not a disk.
pub fn is_source(text: &str) -> bool {
    NbdUri::is_uri(text) || is_path(text)
}

/// Whether a text is the path of a disk: it contains a slash, or is an existing file and not a directory.
pub fn is_path(text: &str) -> bool {
    text.contains('/') || Path::new(text).metadata().is_ok_and(|found| !found.is_dir())
}

/// Saves standard input to a file, after checking that the daemon can import it.
async fn spool(client: &Client, name: &str, quiet: bool) -> anyhow::Result<Spooled> {
    if client.status().await?.store_read_only {
        let why = format!("cannot import '{name}': the store of this daemon is read-only");
        return Err(Problem::new(ProblemKind::Invalid, why).advise(ELSEWHERE).into());
    }
    let Some(data_dir) = client.data_dir() else {
        let why =
            format!("cannot import '{name}': standard input can be imported only by a daemon on this host");
        let advice = "copy the image to the server and give its path there";
        return Err(Problem::new(ProblemKind::Invalid, why).advise(advice).into());
    };
    let mut shown = Shown::begin("the standard input", quiet);
    let spooled = Spooled::standard_input(data_dir, &mut |bytes| shown.read(bytes));
    shown.end();
    spooled
}

fn check_note(note: &str) -> anyhow::Result<()> {
    let (len, most) = (note.len(), NOTE_MAX_BYTES);
    if len <= most {
        return Ok(());
    }
    Err(invalid(format!("the note has {len} bytes, and at most {most} are allowed")))
}

/// Whether a source is the standard input of this process.
pub fn is_standard_input(source: &str) -> bool {
    let leads_there = || std::path::absolute(source).is_ok_and(|path| own_files::is_standard_input(&path));
    source == STANDARD_INPUT || !NbdUri::is_uri(source) && leads_there()
}

fn name_of(source: &str) -> Result<String, Problem> {
    // Text that is not a URI is refused later.
    let export = source.parse::<NbdUri>().ok().map(|uri| uri.export);
    let whole = export.as_deref().unwrap_or(source);
    let last = whole.rsplit('/').next().unwrap_or(whole);
    match image_name_of(last) {
        Some(name) => Ok(name),
        // An export may have an empty name.
        None if export.as_deref() == Some("") => Ok("image".to_owned()),
        None => Err(Problem::new(
            ProblemKind::Invalid,
            format!("'{source}' has no name from which an image name could be made"),
        )
        .advise("give one with --name")),
    }
}

/// Makes paths absolute, because the daemon has another working directory.
fn absolute(source: &str) -> anyhow::Result<String> {
    if NbdUri::is_uri(source) {
        // The daemon refuses text that is not a URI.
        let Ok(mut uri) = source.parse::<NbdUri>() else { return Ok(source.to_owned()) };
        let mut is_whole = true;
        for path in uri.paths_mut().filter(|path| !path.is_absolute()) {
            (*path, is_whole) = (absolute_path(path)?.into(), false);
        }
        return Ok(if is_whole { source.to_owned() } else { uri.to_string() });
    }
    absolute_path(Path::new(source))
}

/// An absolute path, which means the same for the daemon.
pub fn absolute_path(path: &Path) -> anyhow::Result<String> {
    let absolute = std::path::absolute(path)
        .map_err(|e| invalid(format!("'{}' is not a file name: {e}", path.display())))?;
    own_files::refuse(&absolute)?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|odd| {
        invalid(format!("the path {} is not UTF-8, which the API cannot transport", odd.display()))
    })
}

/// The path of a file that the daemon will write. It cannot write to this program's standard output.
pub fn new_file(path: &Path) -> anyhow::Result<String> {
    let is_output =
        ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"].iter().any(|it| path == Path::new(it));
    if is_output {
        let message =
            format!("cannot write to '{}': the daemon writes the file, not this command", path.display());
        return Err(Problem::new(ProblemKind::Invalid, message).advise(NEW_FILE).into());
    }
    absolute_path(path)
}

async fn verify(
    client: &Client,
    image: &str,
    rate_bytes_s: Option<u64>,
    from: Vec<String>,
    json: bool,
) -> anyhow::Result<u8> {
    let from = from.into_iter().map(|store| pull::store_of_daemon(client, store));
    let request = VerifyRequest { repair_from: from.collect::<anyhow::Result<_>>()?, rate_bytes_s };
    let mut shown = Shown::begin(&format!("verify {image}"), json);
    let result = client.verify(image, &request, |progress| shown.update(progress)).await;
    shown.end();
    let TaskResult::Verified(report) = result? else {
        anyhow::bail!(
            "the daemon did not answer with a report: it may be of another version than this program"
        );
    };
    let code = if report.damage.is_empty() { 0 } else { DAMAGED };
    let has_sources = !request.repair_from.is_empty();
    show::if_read(if json { show::json(&report) } else { show_report(&report, has_sources) })?;
    Ok(code)
}

fn show_report(report: &VerifyReport, has_sources: bool) -> anyhow::Result<()> {
    let VerifyReport { version, checked_bytes, damage, repaired, files, remarks, versions, uses, .. } =
        report;
    let place = format!("{}@{}", version.image, version.number);
    for line in damage {
        show::line(&format!("{place}: {}", show::printable(line)))?;
    }
    for file in files {
        show::line(&format!("{place}: a file cannot be read: {}", show::printable(file)))?;
    }
    for remark in remarks {
        show::line(&format!("{place}: {}", verification::not_named(remark)))?;
    }
    for other in versions.iter().filter(|other| **other != place) {
        show::line(&format!("{other} contains some of the damaged data, too"))?;
    }
    for line in uses {
        show::line(&format!("affected: {}", show::printable(line)))?;
    }
    if *repaired > 0 {
        show::line(&format!("{place}: {repaired} damaged chunks or data objects repaired"))?;
    }
    let checked = size::format(*checked_bytes);
    if damage.is_empty() {
        return show::line(&format!("{place} is intact: {checked} read and compared with their hashes"));
    }
    show::line(&format!("{place} {}; {checked} read", verification::is_damaged(report.damaged_chunks)))?;
    if has_sources {
        return Ok(());
    }
    show::line(&verification::how_to_repair(&format!("image verify {place}")))
}

async fn export(client: &Client, image: &str, request: ExportRequest, json: bool) -> anyhow::Result<()> {
    let mut shown = Shown::begin(&format!("export {image}"), json);
    let result = client.export(image, &request, |progress| shown.update(progress)).await;
    shown.end();
    let result = result?;
    if json {
        return show::json(&result);
    }
    if let TaskResult::Exported { version, size_bytes } = result {
        let place = format!("{}@{}", version.image, version.number);
        let (target, format) = (&request.target, request.format.name());
        show::line(&format!("{place} written to {target} as {format}, {}", size::format(size_bytes)))?;
    }
    Ok(())
}

fn show_list(images: &[Image]) -> anyhow::Result<()> {
    show::table(
        &["IMAGE", "VERSIONS", "CHANNELS", "NEWEST", "SIZE", "ADDED", "NEWEST SINCE"],
        images.iter().map(row),
    )
}

fn row(image: &Image) -> Vec<String> {
    // A dash if all versions are retired or removed, because an empty column would confuse scripts.
    let of_newest = |tell: fn(&ImageVersion) -> String| newest(image).map_or_else(|| "-".to_owned(), tell);
    let added: u64 = image.versions.iter().map(|version| version.stored_bytes).sum();
    vec![
        image.name.clone(),
        image.versions.len().to_string(),
        channels::summary(image),
        of_newest(|version| version.number.to_string()),
        of_newest(|version| size::format(version.size_bytes)),
        size::format(added),
        of_newest(|version| show::time(version.created_at_ms)),
    ]
}

fn show_versions(image: &Image) -> anyhow::Result<()> {
    let row = |version: &ImageVersion| {
        vec![
            format!("{}@{}", version.image, version.number),
            version.hash.clone(),
            size::format(version.size_bytes),
            size::format(version.stored_bytes),
            show::time(version.created_at_ms),
            version.source.clone(),
        ]
    };
    show::table(&["VERSION", "HASH", "SIZE", "ADDED", "SINCE", "SOURCE"], image.versions.iter().map(row))?;
    channels::show_session(image)
}

#[cfg(test)]
mod tests {
    use headwater_api::ChannelPointer;

    use super::*;

    /// An image with versions of these sizes in MiB, some of them retired.
    fn image(retired: &[bool]) -> Image {
        let version = |(number, retired): (u64, &bool)| ImageVersion {
            image: "tiny".to_owned(),
            number,
            hash: String::new(),
            size_bytes: number << 20,
            stored_bytes: 1 << 20,
            created_at_ms: number * 86_400_000,
            source: String::new(),
            note: String::new(),
            author: String::new(),
            retired: *retired,
            keeps_identity: false,
            channels: Vec::new(),
        };
        Image {
            name: "tiny".to_owned(),
            versions: (1..).zip(retired).map(version).collect(),
            pointers: Vec::new(),
            scheduled: Vec::new(),
            edit: None,
        }
    }

    #[test]
    fn the_newest_of_a_list_is_no_version_that_is_retired() {
        let told = |retired: &[bool]| row(&image(retired)).join(" ");
        assert_eq!(told(&[false, false]), "tiny 2 - 2 2.0 MiB 2.0 MiB 1970-01-03 00:00:00Z");
        assert_eq!(told(&[false, true, true]), "tiny 3 - 1 1.0 MiB 3.0 MiB 1970-01-02 00:00:00Z");
        assert_eq!(told(&[true]), "tiny 1 - - - 1.0 MiB -");
        assert_eq!(told(&[]), "tiny 0 - - - 0 B -");
    }

    #[test]
    fn a_version_that_machines_boot_unasked_is_told_of() {
        let told = booted_next(&image(&[false, true, false]), 3).unwrap();
        for words in
            ["machines that boot 'tiny' boot version 3", "'headwater image promote tiny@1 production'"]
        {
            assert!(told.contains(words), "{words}: {told}");
        }
        // The first version, the only one that is not retired, one that is not the newest, the newest one.
        for (retired, number) in [
            (&[false][..], 1),
            (&[true, true, false], 3),
            (&[false, false, false], 2),
            (&[false, false, true], 3),
        ] {
            assert_eq!(booted_next(&image(retired), number), None, "{retired:?}, {number}");
        }
        let mut held = image(&[false, false]);
        let pointer = |channel| ChannelPointer { channel, version: 1, at_ms: 0, author: String::new() };
        held.pointers = vec![pointer(Channel::Test)];
        assert!(booted_next(&held, 2).is_some());
        held.pointers.push(pointer(Channel::Production));
        assert_eq!(booted_next(&held, 2), None);
    }

    #[test]
    fn an_older_version_that_machines_boot_since_another_one_is_retired_is_told_of() {
        let told = booted_instead(&image(&[false, false, true]), 3).unwrap();
        assert!(told.contains("machines that boot 'tiny' boot version 2 from their next boot on"), "{told}");
        let told = booted_instead(&image(&[true, true]), 2).unwrap();
        assert!(told.contains("all versions of tiny are retired") && told.contains("do not start"), "{told}");
        // Retiring an older version, or one that no following machine boots, changes nothing.
        assert_eq!(booted_instead(&image(&[true, false]), 1), None);
        let mut held = image(&[false, true]);
        let (channel, author) = (Channel::Production, String::new());
        held.pointers = vec![ChannelPointer { channel, version: 1, at_ms: 0, author }];
        assert_eq!(booted_instead(&held, 2), None);
    }

    #[test]
    fn images_are_named_after_their_source() {
        for (source, name) in [
            ("/disks/Debian 12.qcow2", "debian-12"),
            ("nbd+unix:///lab?socket=/tmp/x.sock", "lab"),
            ("nbd://127.0.0.1:10809/", "image"),
            ("nbd://10.0.0.5", "image"),
            ("nbd://127.0.0.1/My%20Disk", "my-disk"),
            ("nbd://127.0.0.1/pool/vm1", "vm1"),
            ("/disks/vm?1.raw", "vm-1"),
        ] {
            assert_eq!(name_of(source).unwrap(), name);
        }
        for source in ["/disks/\u{65e5}\u{672c}.raw", ".hidden", "nbd://127.0.0.1/\u{65e5}"] {
            let problem = name_of(source).unwrap_err();
            assert!(
                problem.to_string().contains(source) && problem.to_string().contains("--name"),
                "{problem}"
            );
        }
    }
}
