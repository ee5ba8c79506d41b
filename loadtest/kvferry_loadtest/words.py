"""The words that prompts are made of.

1,024 common lowercase words of three to eight letters. With a space before it each is one token in SmolLM2's tokenizer
(49,000 tokens) and in Mistral's Tekken (131,000); in the former also without the space, and among the first 6,000, so
that other byte-level BPE vocabularies can be expected to have them, too.
"""

from __future__ import annotations

_LINES = """
ability able about above accept access account action actions active actual adapt added adding address adjust adult
after against age ago agree aid aim air align allowed allows almost along already also always among amount and
animal animals annual another answer answers any apart applied apply are area around array art article ask aspect
assign attempt author authors average avoid aware away baby back bad balance ball bank bar base basic because before
begin below benefit best better between big billion bird birds birth bit black block blue body bond bone book books
both bottom box brain break brief bright broad brother build built but buy call called came camp can cannot capacity
capital car carbon card care cases cast cat causing cells center central certain change changed changes chapter
charge check child choice choices choose city civil claim class classes clean clear click client climate close coal
coast code cold college color colors column come comes comfort coming comment common company concept conduct confirm
connect contact content context control cook cool copy core correct cost count counter country course cover covered
create credit cross current custom cut cycle daily dark date day days deal deep default defined degree degrees
demand detail details device did digital direct display doctor does dog dogs doing done double down draw drive drop
dry due during each early earth easy eat edge effects egg eight either element else email enable end energy enough
ensure enter equal error even event events ever every exact example except expand expert extra extract eye face
faced factor factors facts fail failure fair fall famous far farm fast father feature feed feel feet felt few field
fields figure file files filled film final find fine fire firm first fish fit five fix flat flowers fluid focus
focused follow food foods foot for forces forest form formal format formed former forms forward found four free
freedom fresh friend friends from front fruit fuel full fully fund future gain game games gas gather general get
gets getting give given giving glass global goal going gold good got grade grand grant graph grass great greater
ground group groups grow growing growth guide had hair half handle hands happy hard has have having head healthy
heart heat height help helpful helps her here hidden high higher highest his history hit hold host hot hour hours
house how however ice idea ideal image images impact income index inform initial input inside install instead into
invent iron issue item items job jobs join joint journal just justice keep keeping key kid kids kind known label
land lands large largest last late later law laws layer layers leader leading learn least leave leaves led left
legal length less let letter letters level levels library light like likely limit limited line lines link linked
links liquid list little live lived living local log long look looking loss lot love low lower machine made main
mainly make manage map mark market mass master match math matter max maximum may maybe mean meaning measure media
medical medium member members memory message metal methods mid middle might million mind minor minutes miss mix mode
model models moment money month months more most mostly mother motion motor mount mouth move moving much music must
name named names natural nature near need needed needs net network never new news next night nor normal north not
note notes nothing number numbers object objects ocean off offer office often oil old older once one ones online
only onto open option options order origin other others our out output outside over own owners pack page pages paper
papers parent parents part parts party pass passed past path patient pattern pay pen people perfect perhaps person
pet phase phone pick picture piece pieces place placed places plan planet plant plants plastic play played playing
plays please plot point points policy poor popular port post power predict prepare present pretty price prior
private process program project protein public purpose push put quality quick quite radio rain raise raised random
range rare rate rates rather raw reach read reading ready real really reason receive recent record records red
reduce reduced reflect region regions regular related release remove replace report reports request require research
respect respond rest result results return review rich right rights rise river road rock role roles roll room root
roots round row rule rules run running safe safety said salt same sample samples sand sat save say scale school
science screen sea search season second section sector secure see seed seeds seek seeking seen select self send
sense sent series service set sets setting seven several shape share shared sharing she ship short should show side
sign signal similar simple since single sit site sites six size skill skills skin sleep slow small smart smooth snow
social soft soil solar sold solid solve someone son song soon sort sound source sources south space spaces special
speech speed spot spread spring square staff stage star stars start started state states station status stay step
steps stone stop storage store stories storm story stream string strong student studies study style subject such
sugar sum summer sun super supply support surface symbol system systems table take taken taking talk target task
tasks tax teacher team tell ten term terms testing tests text texts than that the them then theory there these thick
thin thing things think third this those though three through thus time times tiny tips title today too tool tools
tooth top topic topics total town track trade traffic train travel treated tree trees true trust truth try turn two
types under unique unit units until upon upper urban use user uses valid value values vary vehicle version via video
view views virtual vision visit visual voice volume walk wall walls want warm was waste watch water waters way ways
wealth wear weather web website week weight well went were wet what when where which while who whole whose why wild
win wind window winter with within won wood word words work worked workers working works world worth would write
writing written wrong year yellow yet yield you young your
"""

WORDS: tuple[str, ...] = tuple(_LINES.split())
