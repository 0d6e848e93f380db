//! Parses published traces in text formats. Errors name line and column.

use std::io::{BufRead, BufReader, Read};

use anyhow::{Context, Result, bail};
use headwater_recorder::Content;

use super::{Kind, Named, Request, Trace, one_less};

const SYSTOR_HEAD: &str = "Timestamp,Response,IOType,LUN,Offset,Size";

/// The format of a text, recognised by its first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Systor,
    Msr,
}

/// A field of a line, and the column at which it begins, from 1.
#[derive(Clone, Copy)]
struct Field<'a> {
    text: &'a str,
    column: usize,
}

fn fields(line: &str) -> Vec<Field<'_>> {
    let mut column = 1;
    line.split(',')
        .map(|text| {
            let field = Field { text: text.trim(), column };
            column += text.chars().count() + 1;
            field
        })
        .collect()
}

impl Field<'_> {
    fn number(self, what: &str) -> Result<u64> {
        match self.text.parse() {
            Ok(number) => Ok(number),
            Err(_) => {
                bail!("column {}: {what} is {:?}, but must be a whole number", self.column, self.text)
            }
        }
    }

    /// Parses seconds with decimal places. Returns microseconds.
    fn seconds_us(self, what: &str) -> Result<u64> {
        let (whole, part) = self.text.split_once('.').unwrap_or((self.text, ""));
        let micros: String = part.chars().chain("000000".chars()).take(6).collect();
        let is_number = !whole.is_empty() && part.chars().all(|digit| digit.is_ascii_digit());
        let parsed = whole.parse::<u64>().ok().zip(micros.parse::<u64>().ok());
        let us = parsed.and_then(|(whole, micros)| whole.checked_mul(1_000_000)?.checked_add(micros));
        match us.filter(|_| is_number) {
            Some(us) => Ok(us),
            None => {
                bail!("column {}: {what} is {:?}, but must be a number of seconds", self.column, self.text)
            }
        }
    }
}

/// The requests of the texts of a trace.
#[derive(Default)]
pub(super) struct Texts {
    named: Named,
    unanswered: u64,
}

impl Texts {
    pub(super) fn read(&mut self, from: impl Read, left: &mut usize) -> Result<()> {
        let mut reader = BufReader::with_capacity(1 << 16, from);
        let (mut line, mut format) = (String::new(), None);
        for number in 1_u64.. {
            line.clear();
            let read = reader.by_ref().take(4096).read_line(&mut line);
            if read.with_context(|| format!("cannot read line {number} as text"))? == 0 {
                return Ok(());
            }
            let text = line.trim_end().trim_start_matches('\u{feff}');
            if text.is_empty() {
                continue;
            }
            let fields = fields(text);
            let Some(format) = format else {
                let found = of_first_line(text, fields.len()).with_context(|| format!("line {number}"))?;
                format = Some(found);
                if found == Format::Msr {
                    one_less(left)?;
                    self.msr(&fields).with_context(|| format!("line {number}"))?;
                }
                continue;
            };
            one_less(left)?;
            let added = match format {
                // A file that was joined from several files contains the head line again.
                Format::Systor if text == SYSTOR_HEAD => Ok(()),
                Format::Systor => self.systor(&fields),
                Format::Msr => self.msr(&fields),
            };
            added.with_context(|| format!("line {number}"))?;
        }
        Ok(())
    }

    fn systor(&mut self, fields: &[Field<'_>]) -> Result<()> {
        let [time, _response, kind, lun, offset, size] = fields else {
            bail!("column 1: there are {} fields instead of six: {SYSTOR_HEAD}", fields.len());
        };
        let time_us = time.seconds_us("the time")?;
        let kind = match kind.text {
            "R" => Kind::Read,
            "W" => Kind::Write,
            // The recording lacks the answer, and therefore the kind.
            "" => {
                self.unanswered += 1;
                return Ok(());
            }
            other => bail!("column {}: the kind is {other:?}, but must be R, W or empty", kind.column),
        };
        let name = format!("LUN {}", lun.text);
        self.add(&name, time_us, kind, offset, size)
    }

    fn msr(&mut self, fields: &[Field<'_>]) -> Result<()> {
        let [time, host, disk, kind, offset, size, _response] = fields else {
            bail!("column 1: there are {} fields instead of the seven of MSR Cambridge", fields.len());
        };
        // Units of 100 ns since 1601.
        let time_us = time.number("the time")? / 10;
        let kind = match kind.text {
            "Read" => Kind::Read,
            "Write" => Kind::Write,
            other => bail!("column {}: the kind is {other:?}, but must be Read or Write", kind.column),
        };
        let name = format!("{} {}", host.text, disk.text);
        self.add(&name, time_us, kind, offset, size)
    }

    fn add(
        &mut self,
        name: &str,
        time_us: u64,
        kind: Kind,
        offset: &Field<'_>,
        size: &Field<'_>,
    ) -> Result<()> {
        let (first, bytes) = (offset.number("the offset")?, size.number("the size")?);
        if first.checked_add(bytes).is_none_or(|end| end > headwater_block::range::VOLUME_MAX_BYTES) {
            bail!(
                "column {}: the offset plus the size (column {}) is beyond 16 TiB, the largest disk: correct the line, or remove it",
                offset.column,
                size.column
            );
        }
        let request = Request { time_us, offset: first, bytes, kind, content: Content::Unknown };
        self.named.volume(name).requests.push(request);
        Ok(())
    }

    /// Adds the disks to a trace. Times are relative to the first request.
    pub(super) fn finish(mut self, trace: &mut Trace) {
        let times =
            self.named.volumes.iter().flat_map(|volume| &volume.requests).map(|request| request.time_us);
        let first_us = times.min().unwrap_or(0);
        for request in self.named.volumes.iter_mut().flat_map(|volume| &mut volume.requests) {
            request.time_us -= first_us;
        }
        if self.unanswered > 0 {
            trace.notes.push(format!(
                "{} lines have no kind, because the answer was lost. They are skipped.",
                self.unanswered
            ));
        }
        trace.volumes.append(&mut self.named.volumes);
    }
}

fn of_first_line(text: &str, fields: usize) -> Result<Format> {
    match fields {
        6 if text.eq_ignore_ascii_case(SYSTOR_HEAD) => Ok(Format::Systor),
        7 => Ok(Format::Msr),
        _ => bail!(
            "column 1: this is neither the head of SYSTOR '17 ({SYSTOR_HEAD}) nor a line of MSR Cambridge (seven fields), \
             and the file is not a recording of headwater"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SYSTOR: &str = "Timestamp,Response,IOType,LUN,Offset,Size
1455592801.002364000,0.000456000,W,5,21485883392,4096
1455592800.500000,0.01,R,3,0,65536
1455592802.25,,,5,512,512
";
    const MSR: &str = "128166372003061629,hm,0,Read,383496192,32768,113736
128166372013061629,hm,1,Write,512,4096,22736
";

    fn load(texts: &[&[u8]]) -> Result<Trace> {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..texts.len()).map(|number| dir.path().join(format!("t{number}"))).collect();
        texts.iter().zip(&paths).for_each(|(text, path)| std::fs::write(path, text).unwrap());
        Trace::load(&paths)
    }

    fn request(time_us: u64, offset: u64, bytes: u64, kind: Kind) -> Request {
        Request { time_us, offset, bytes, kind, content: Content::Unknown }
    }

    #[test]
    fn lines_of_both_published_traces_become_requests_by_disk() {
        let systor = load(&[SYSTOR.as_bytes()]).unwrap();
        let expected = [
            ("LUN 5", request(502_364, 21_485_883_392, 4096, Kind::Write)),
            ("LUN 3", request(0, 0, 65_536, Kind::Read)),
        ];
        assert_eq!(systor.volumes.len(), 2);
        for (volume, (name, request)) in systor.volumes.iter().zip(expected) {
            assert_eq!((volume.name.as_str(), &volume.requests), (name, &vec![request]));
        }
        assert!(systor.notes[0].contains("1 lines have no kind"), "{:?}", systor.notes);
        assert!(!systor.has_contents);

        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(MSR.as_bytes()).unwrap();
        let msr = load(&[&packed.finish().unwrap()]).unwrap();
        assert_eq!(msr.volumes[0].requests, [request(0, 383_496_192, 32_768, Kind::Read)]);
        assert_eq!(msr.volumes[1].requests, [request(1_000_000, 512, 4096, Kind::Write)]);
        assert_eq!(msr.volumes[1].name, "hm 1");
    }

    #[test]
    fn files_of_one_disk_are_one_volume_by_time() {
        let later = SYSTOR.replace("1455592801", "1455592810").replace("1455592800", "1455592809");
        let trace = load(&[later.as_bytes(), SYSTOR.as_bytes()]).unwrap();
        let times: Vec<u64> = trace.volumes[0].requests.iter().map(|request| request.time_us).collect();
        assert_eq!((trace.volumes.len(), times), (2, vec![502_364, 9_502_364]));
    }

    #[test]
    fn broken_lines_are_refused_with_line_and_column() {
        for (text, from, to, error) in [
            (SYSTOR, ",W,", ",X,", "line 2: column 34: the kind is \"X\""),
            (SYSTOR, "1455592800.5", "145x.5", "line 3: column 1: the time is \"145x.500000\""),
            (SYSTOR, ",4096\n", ",-1\n", "line 2: column 50: the size is \"-1\""),
            (SYSTOR, ",W,5", ",W", "line 2: column 1: there are 5 fields"),
            (MSR, ",512,", ",5l2,", "line 2: column 31: the offset is \"5l2\""),
            (
                MSR,
                "383496192",
                "18446744073709551615",
                "line 1: column 30: the offset plus the size (column ",
            ),
            (MSR, "128166372003061629,hm,0", "12,hm", "line 1: column 1: this is neither"),
        ] {
            let found = format!("{:#}", load(&[text.replace(from, to).as_bytes()]).unwrap_err());
            assert!(found.contains(error), "{found}");
        }
        assert!(format!("{:#}", load(&[b""]).unwrap_err()).contains("no requests"));
        let cut = format!("{:#}", load(&[&[0x28, 0xb5, 0x2f, 0xfd, 1, 2]]).unwrap_err());
        assert!(cut.contains("cannot use the trace"), "{cut}");
    }
}
