//! Reading the table of files and the values of attributes, each by the runs that lead to it.

use super::boot::Layout;
use super::lznt1;
use super::record::{Attribute, Record, Reference, Sizes, Value, types};
use super::runs::Runs;
use crate::units::{u64_of, usize_of};
use crate::{Bytes, Fault, fault};

/// The longest list of the attributes of a file: Windows makes none that is longer.
const ATTRIBUTE_LIST_BYTES_MAX: u64 = 256 << 10;
/// The most bytes that are compressed together. Windows compresses 64 KiB.
const UNIT_BYTES_MAX: u64 = 1 << 20;
/// The most records of a table of files.
pub(super) const RECORDS_MAX: u64 = 20_000_000;
/// How much of the table of files is read at a time.
const PASS_BYTES: u64 = 1 << 20;

/// Whether an attribute's name, in UTF-16, is the one that is meant.
pub(super) type IsName<'a> = &'a dyn Fn(&[u8]) -> bool;

/// The name of most attributes, which is none.
pub(super) fn unnamed(name: &[u8]) -> bool {
    name.is_empty()
}

/// The value of an attribute, with all of its parts.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    Resident(Vec<u8>),
    Clusters(Stored),
}

/// A value in clusters.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) runs: Runs,
    pub(super) sizes: Sizes,
    /// How many clusters are compressed together.
    unit_clusters: Option<u64>,
}

impl Contents {
    pub(super) fn size_bytes(&self) -> u64 {
        match self {
            Self::Resident(value) => u64_of(value.len()),
            Self::Clusters(stored) => stored.sizes.size_bytes,
        }
    }

    /// Joins an attribute to what was found before of the same one.
    fn join(found: Option<Self>, attribute: &Attribute<'_>, layout: &Layout) -> Result<Self, Fault> {
        match (found, attribute.value) {
            (None, Value::Resident(value)) => Ok(Self::Resident(value.to_vec())),
            (None, Value::Clusters(part)) => {
                let sizes = part.sizes;
                let sizes = sizes.ok_or_else(|| fault("damaged NTFS: an attribute has no first part"))?;
                let unit_clusters = match attribute.is_compressed() {
                    true => Some(unit_clusters(part.unit_power, layout)?),
                    false => None,
                };
                let mut stored = Stored { runs: Runs::default(), sizes, unit_clusters };
                stored.runs.add(&part, layout)?;
                Ok(Self::Clusters(stored))
            }
            (Some(Self::Clusters(mut stored)), Value::Clusters(part)) => {
                stored.runs.add(&part, layout)?;
                Ok(Self::Clusters(stored))
            }
            _ => Err(fault("damaged NTFS: a file has an attribute twice")),
        }
    }
}

fn unit_clusters(power: u8, layout: &Layout) -> Result<u64, Fault> {
    let clusters = 1u64.checked_shl(power.into()).filter(|_| power > 0);
    let fits = |clusters: &u64| clusters.saturating_mul(layout.cluster_bytes) <= UNIT_BYTES_MAX;
    clusters
        .filter(fits)
        .ok_or_else(|| fault(format!("a file is compressed in too large units (2^{power} clusters)")))
}

/// An attribute as a list of attributes has it.
struct Listed {
    first: u64,
    record: Reference,
}

/// The entries of a list of attributes that are parts of an attribute, in their order.
fn listed(list: &[u8], kind: u32, is_name: IsName<'_>) -> Result<Vec<Listed>, Fault> {
    let mut out = all_listed(list, |found, name| found == kind && is_name(name))?;
    out.sort_by_key(|part| part.first);
    Ok(out)
}

/// The entries of a list of attributes with a type and a name that are `wanted`.
fn all_listed(list: &[u8], wanted: impl Fn(u32, &[u8]) -> bool) -> Result<Vec<Listed>, Fault> {
    use super::fields::{u8_at, u16_at, u32_at, u64_at};
    let mut rest = list;
    let mut out = Vec::new();
    while !rest.is_empty() {
        let entry = || -> Option<(bool, Listed, &[u8])> {
            let (entry, rest) = rest.split_at_checked(u16_at(rest, 4)?.into())?;
            let name_bytes = 2 * usize::from(u8_at(entry, 6)?);
            let its_name = match name_bytes {
                0 => &[][..],
                _ => entry.get(u8_at(entry, 7)?.into()..)?.get(..name_bytes)?,
            };
            let is_part = wanted(u32_at(entry, 0)?, its_name);
            let record = Reference::of(u64_at(entry, 16)?);
            Some((is_part, Listed { first: u64_at(entry, 8)?, record }, rest))
        };
        let invalid = || fault("damaged NTFS: a list of attributes is invalid");
        let (is_part, part, after) = entry().ok_or_else(invalid)?;
        rest = after;
        if is_part {
            out.push(part);
        }
    }
    Ok(out)
}

/// A volume, of which the table of files can be found.
pub(super) struct Volume {
    pub(super) bytes: Bytes,
    pub(super) layout: Layout,
    mft: Stored,
}

impl Volume {
    pub(super) fn open(mut bytes: Bytes, layout: Layout) -> Result<Self, Fault> {
        let at = layout.mft_cluster.saturating_mul(layout.cluster_bytes);
        let mut record = vec![0; usize_of(layout.record_bytes)];
        bytes.read(at, &mut record)?;
        let record = Record::of(record)?.ok_or_else(|| fault("the first record of its MFT is not in use"))?;
        let first =
            find(&record, types::DATA, &unnamed, 0)?.ok_or_else(|| fault("its MFT has no data attribute"))?;
        let Contents::Clusters(mft) = Contents::join(None, &first, &layout)? else {
            return Err(fault("the data of its MFT is inside its own record"));
        };
        let mut volume = Self { bytes, layout, mft };
        volume.join_table(&record)?;
        let is_whole = volume.mft.runs.all().iter().all(|run| run.on_disk.is_some());
        if !is_whole || volume.mft.unit_clusters.is_some() {
            return Err(fault("its MFT is sparse or compressed"));
        }
        if volume.records() > RECORDS_MAX {
            return Err(fault(format!("its MFT has more than {RECORDS_MAX} records")));
        }
        Ok(volume)
    }

    /// Adds the parts of the table of files that other records know. They lie in the parts before.
    fn join_table(&mut self, first: &Record) -> Result<(), Fault> {
        let Some(list) = self.attribute_list(first)? else { return Ok(()) };
        for part in listed(&list, types::DATA, &unnamed)?.into_iter().filter(|part| part.first > 0) {
            let record = self.extension(part.record, 0, first.sequence)?;
            let Some(attribute) = find(&record, types::DATA, &unnamed, part.first)? else {
                return Err(fault("damaged NTFS: a part of its file table (MFT) is missing"));
            };
            if let Value::Clusters(part) = attribute.value {
                self.mft.runs.add(&part, &self.layout)?;
            }
        }
        Ok(())
    }

    /// How many records the table of files has.
    pub(super) fn records(&self) -> u64 {
        let mapped = self.mft.runs.end().saturating_mul(self.layout.cluster_bytes);
        let sizes = self.mft.sizes;
        sizes.size_bytes.min(sizes.written_bytes).min(mapped) / self.layout.record_bytes
    }

    /// Reads a record. `None`: nobody uses it.
    pub(super) fn record(&mut self, number: u64) -> Result<Option<Record>, Fault> {
        if number >= self.records() {
            return Err(fault(format!("there is no record {number} in the MFT")));
        }
        let mut record = vec![0; usize_of(self.layout.record_bytes)];
        let at = number.saturating_mul(self.layout.record_bytes);
        read_runs(&mut self.bytes, &self.layout, &self.mft.runs, at, &mut record)?;
        Record::of(record)
    }

    /// Calls `found` with each record, in the order of their numbers. Reading goes in large pieces.
    pub(super) fn each_record(
        &mut self,
        mut found: impl FnMut(u64, Result<Option<Record>, Fault>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let record_bytes = usize_of(self.layout.record_bytes);
        let at_once = (PASS_BYTES / self.layout.record_bytes).max(1);
        let mut number = 0;
        while number < self.records() {
            let count = at_once.min(self.records() - number);
            let mut piece = vec![0; usize_of(count).saturating_mul(record_bytes)];
            let at = number.saturating_mul(self.layout.record_bytes);
            let read = read_runs(&mut self.bytes, &self.layout, &self.mft.runs, at, &mut piece);
            for record in piece.chunks(record_bytes) {
                // If a part of the piece cannot be read, the other records of it can.
                let record = match read {
                    Ok(()) => Record::of(record.to_vec()),
                    Err(_) => self.record(number),
                };
                found(number, record)?;
                number += 1;
            }
        }
        Ok(())
    }

    /// The record that continues another one.
    fn extension(&mut self, of: Reference, base: u64, sequence: u16) -> Result<Record, Fault> {
        let record = self.record(of.number)?.filter(|record| of.fits(record.sequence));
        let is_its =
            |record: &Record| record.base.is_some_and(|found| found.number == base && found.fits(sequence));
        record.filter(is_its).ok_or_else(|| fault("damaged NTFS: a further MFT record of a file is missing"))
    }

    fn attribute_list(&mut self, record: &Record) -> Result<Option<Vec<u8>>, Fault> {
        let Some(list) = find(record, types::ATTRIBUTE_LIST, &unnamed, 0)? else { return Ok(None) };
        let list = Contents::join(None, &list, &self.layout)?;
        if list.size_bytes() > ATTRIBUTE_LIST_BYTES_MAX {
            return Err(fault(format!("damaged NTFS: a list of attributes has {} bytes", list.size_bytes())));
        }
        self.whole(&list).map(Some)
    }

    /// The numbers of the records that a file's attributes are in, by its list of attributes.
    pub(super) fn records_of(&mut self, number: u64, bytes_left: &mut u64) -> Result<Vec<u64>, Fault> {
        let Some(base) = self.record(number)? else { return Ok(Vec::new()) };
        let list = self.attribute_list(&base)?.unwrap_or_default();
        let left = bytes_left.checked_sub(u64_of(list.len()));
        let too_long = || fault("damaged NTFS: its lists of attributes are longer than the volume");
        *bytes_left = left.ok_or_else(too_long)?;
        Ok(all_listed(&list, |_, _| true)?.into_iter().map(|part| part.record.number).collect())
    }

    /// An attribute of the file that begins in a record.
    pub(super) fn contents(
        &mut self,
        number: u64,
        kind: u32,
        is_name: IsName<'_>,
    ) -> Result<Option<Contents>, Fault> {
        let base = self.record(number)?.filter(|record| record.base.is_none());
        let base =
            base.ok_or_else(|| fault(format!("MFT record {number} is not the first record of a file")))?;
        let Some(list) = self.attribute_list(&base)? else {
            return match find(&base, kind, is_name, 0)? {
                Some(attribute) => Contents::join(None, &attribute, &self.layout).map(Some),
                None => Ok(None),
            };
        };
        let mut found = None;
        for part in listed(&list, kind, is_name)? {
            let other = match part.record.number == number {
                true => None,
                false => Some(self.extension(part.record, number, base.sequence)?),
            };
            let attribute = find(other.as_ref().unwrap_or(&base), kind, is_name, part.first)?;
            let attribute = attribute.ok_or_else(|| fault("damaged NTFS: an attribute lacks a part"))?;
            found = Some(Contents::join(found, &attribute, &self.layout)?);
        }
        Ok(found)
    }

    /// All of a value, which must not be longer than memory may be taken for it.
    pub(super) fn whole(&mut self, contents: &Contents) -> Result<Vec<u8>, Fault> {
        let mut value = vec![0; usize_of(contents.size_bytes())];
        self.read(contents, 0, &mut value)?;
        Ok(value)
    }

    /// Fills `into` from `at` in a value; less only at its end. Returns how much.
    pub(super) fn read(&mut self, contents: &Contents, at: u64, into: &mut [u8]) -> Result<usize, Fault> {
        let len = usize_of(contents.size_bytes().saturating_sub(at)).min(into.len());
        let into = into.get_mut(..len).unwrap_or_default();
        match contents {
            Contents::Resident(value) => {
                let value = value.get(usize_of(at)..).and_then(|rest| rest.get(..len));
                into.copy_from_slice(value.unwrap_or_default());
            }
            Contents::Clusters(stored) => {
                let written = usize_of(stored.sizes.written_bytes.saturating_sub(at)).min(len);
                let (written, rest) = into.split_at_mut(written);
                rest.fill(0);
                match stored.unit_clusters {
                    None => read_runs(&mut self.bytes, &self.layout, &stored.runs, at, written)?,
                    Some(unit) => self.read_units(&stored.runs, unit, at, written)?,
                }
            }
        }
        Ok(len)
    }

    fn read_units(&mut self, runs: &Runs, unit: u64, at: u64, into: &mut [u8]) -> Result<(), Fault> {
        let unit_bytes = unit.saturating_mul(self.layout.cluster_bytes);
        let mut unpacked = Vec::new();
        let mut done = 0;
        while done < into.len() {
            let from = at.saturating_add(u64_of(done));
            let (number, skip) = (from / unit_bytes, usize_of(from % unit_bytes));
            self.read_unit(runs, number.saturating_mul(unit), unit, &mut unpacked)?;
            let found = unpacked.get(skip..).unwrap_or_default();
            let rest = into.get_mut(done..).unwrap_or_default();
            let len = found.len().min(rest.len());
            rest.iter_mut().zip(found).for_each(|(to, from)| *to = *from);
            done += len;
        }
        Ok(())
    }

    /// Unpacks the clusters that are compressed together and begin with `first`.
    fn read_unit(&mut self, runs: &Runs, first: u64, unit: u64, into: &mut Vec<u8>) -> Result<(), Fault> {
        if first >= runs.end() {
            return Err(fault("damaged NTFS: an attribute is longer than its clusters"));
        }
        let is_stored = |at: &u64| runs.run_of(*at).is_some_and(|run| run.on_disk.is_some());
        let stored = (first..first.saturating_add(unit)).take_while(is_stored).count();
        let cluster_bytes = usize_of(self.layout.cluster_bytes);
        into.clear();
        into.resize(usize_of(unit).saturating_mul(cluster_bytes), 0);
        if stored == 0 {
            return Ok(());
        }
        let mut packed = vec![0; stored.saturating_mul(cluster_bytes)];
        let at = first.saturating_mul(self.layout.cluster_bytes);
        read_runs(&mut self.bytes, &self.layout, runs, at, &mut packed)?;
        if packed.len() == into.len() {
            *into = packed;
            return Ok(());
        }
        lznt1::unpack(&packed, into).ok_or_else(|| fault("a compressed file cannot be unpacked"))
    }
}

/// The attribute of a record that has this type and name and begins with this cluster.
fn find<'a>(
    record: &'a Record,
    kind: u32,
    is_name: IsName<'_>,
    first: u64,
) -> Result<Option<Attribute<'a>>, Fault> {
    for attribute in record.attributes() {
        let attribute = attribute?;
        let begins = match attribute.value {
            Value::Resident(_) => 0,
            Value::Clusters(part) => part.first,
        };
        if attribute.kind == kind && is_name(attribute.name) && begins == first {
            return Ok(Some(attribute));
        }
    }
    Ok(None)
}

/// Fills `into` from `at` in a value that is stored as it is.
fn read_runs(bytes: &mut Bytes, layout: &Layout, runs: &Runs, at: u64, into: &mut [u8]) -> Result<(), Fault> {
    let mut done = 0;
    while done < into.len() {
        let from = at.saturating_add(u64_of(done));
        let run = runs.run_of(from / layout.cluster_bytes);
        let run = run.ok_or_else(|| fault("damaged NTFS: an attribute is longer than its clusters"))?;
        // All places in a run were checked to be in the volume, which has fewer than 2^64 bytes.
        let skip = from - run.first * layout.cluster_bytes;
        let left = run.clusters.saturating_mul(layout.cluster_bytes).saturating_sub(skip);
        let rest = into.get_mut(done..).unwrap_or_default();
        let len = usize_of(left).min(rest.len());
        let piece = rest.get_mut(..len).unwrap_or_default();
        match run.on_disk {
            Some(first) => {
                bytes.read(first.saturating_mul(layout.cluster_bytes).saturating_add(skip), piece)?
            }
            None => piece.fill(0),
        }
        done += len;
    }
    Ok(())
}
